// A pass that makes one operation of a lookup and the check of its ids.

#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "graph_edges.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

namespace {

// Finds the range of a lookup's inputs that are ids.
bool FindIds(const Node* lookup, int* begin, int* end) {
  tensorflow::NameRangeMap inputs;
  if (!tensorflow::NameRangesForNode(lookup->attrs(), lookup->op_def(),
                                     &inputs, nullptr)
           .ok()) {
    return false;
  }
  if (inputs.find("ids") == inputs.end()) return false;
  std::tie(*begin, *end) = inputs["ids"];
  return true;
}

// The lookup that takes all that an operation checks, and is the only one to
// take any of it, as where nothing is trained; null if there is none.
Node* FindLookup(const Node* check) {
  Node* lookup = nullptr;
  std::unordered_set<int> taken;
  for (const Edge* edge : check->out_edges()) {
    if (lookup == nullptr) lookup = edge->dst();
    if (edge->dst() != lookup) return nullptr;
    if (!edge->IsControlEdge()) taken.insert(edge->src_output());
  }
  const bool found =
      lookup != nullptr &&
      (lookup->type_string() == "TfrsEmbedLookup" ||
       lookup->type_string() == "TfrsEmbedLookupConcat") &&
      lookup->assigned_device_name() == check->assigned_device_name() &&
      static_cast<int>(taken.size()) == check->num_outputs();
  return found ? lookup : nullptr;
}

// Removes a check and lets the lookup of the checked ids do it.
void FuseCheck(Graph* graph, Node* check) {
  Node* lookup = FindLookup(check);
  std::vector<int64_t> rows, rows_of;
  std::vector<std::string> names, names_of;
  int begin, end;
  // A lookup has one check. If it has one already, this one stays.
  if (lookup == nullptr || !FindIds(lookup, &begin, &end) ||
      !tensorflow::GetNodeAttr(check->attrs(), "rows", &rows).ok() ||
      !tensorflow::GetNodeAttr(check->attrs(), "names", &names).ok() ||
      static_cast<int>(rows.size()) != check->num_outputs() ||
      static_cast<int>(names.size()) != check->num_outputs() ||
      !tensorflow::GetNodeAttr(lookup->attrs(), "rows", &rows_of).ok() ||
      !rows_of.empty()) {
    return;
  }
  // The checked ids that each feature of the lookup has.
  std::vector<const Edge*> checked, ids;
  for (int i = begin; i < end; ++i) {
    const Edge* after;
    const Edge* before;
    if (!lookup->input_edge(i, &after).ok() || after->src() != check ||
        !check->input_edge(after->src_output(), &before).ok()) {
      return;
    }
    checked.push_back(after);
    ids.push_back(before);
    rows_of.push_back(rows[after->src_output()]);
    names_of.push_back(names[after->src_output()]);
  }
  for (const Edge* edge : check->out_edges()) {
    const int input = edge->dst_input();
    if (!edge->IsControlEdge() && (input < begin || input >= end)) return;
  }
  lookup->AddAttr("rows", rows_of);
  lookup->AddAttr("names", names_of);
  for (int i = begin; i < end; ++i) {
    const Edge* before = ids[i - begin];
    graph->RemoveEdge(checked[i - begin]);
    graph->AddEdge(before->src(), before->src_output(), lookup, i);
  }
  for (const Edge* edge : check->in_edges()) {
    if (edge->IsControlEdge()) graph->AddControlEdge(edge->src(), lookup);
  }
  graph->RemoveNode(check);
}

class FuseChecks : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    const auto chosen = [](const Node* node) {
      return node->type_string() == "TfrsEmbedRequire";
    };
    for (Node* node : FindNodes(options, chosen)) {
      FuseCheck(options.graph->get(), node);
    }
    return absl::OkStatus();
  }
};

// After fuse_concat.cc, whose operations check ids too.
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 2,
    FuseChecks);

}  // namespace
}  // namespace tfrs_embed
