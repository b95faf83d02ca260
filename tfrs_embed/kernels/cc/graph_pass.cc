// Puts kernels into graphs.
//
// A graph that may be exported calls a function of TensorFlow's operations; the
// call has the kernel's node as an attribute that others ignore. Where this
// library is loaded, a pass below replaces the call just before it runs.
//
// Another pass makes one operation of a lookup and the concatenation of all its
// vectors, which then are written where they belong in the first place; and one
// of a lookup and the check of its ids.

#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

using tensorflow::DataTypeVector;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

namespace {

constexpr char kAttribute[] = "_tfrs_embed_kernel";

// Lets what takes a node's outputs, or waits for it, do so of another's.
void MoveOutputs(Graph* graph, Node* from, Node* to) {
  const std::vector<const Edge*> edges(from->out_edges().begin(),
                                       from->out_edges().end());
  for (const Edge* edge : edges) {
    Node* taker = edge->dst();
    const int output = edge->src_output(), input = edge->dst_input();
    graph->RemoveEdge(edge);
    graph->AddEdge(to, output, taker, input);
  }
}

// Moves the call's edges to a new node; leaves the call if they don't fit.
void Replace(Graph* graph, Node* call, const std::string& kernel) {
  NodeDef def;
  if (!def.ParseFromString(kernel)) return;
  def.set_name(call->name());
  def.set_device(call->requested_device());
  def.clear_input();
  // A release before this one didn't know of all attributes.
  const tensorflow::OpDef* op;
  if (!graph->op_registry()->LookUpOpDef(def.op(), &op).ok()) return;
  tensorflow::AddDefaultsToNodeDef(*op, &def);
  absl::Status status;
  Node* node = graph->AddNode(def, &status);
  if (!status.ok()) return;
  if (node->input_types() != call->input_types() ||
      node->output_types() != call->output_types()) {
    graph->RemoveNode(node);
    return;
  }
  node->set_assigned_device_name(call->assigned_device_name());
  for (const Edge* edge : call->in_edges()) {
    graph->AddEdge(edge->src(), edge->src_output(), node, edge->dst_input());
  }
  MoveOutputs(graph, call, node);
  graph->RemoveNode(call);
}

class UseKernels : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || *options.graph == nullptr) {
      return absl::OkStatus();
    }
    Graph* graph = options.graph->get();
    std::vector<Node*> calls;
    for (Node* node : graph->op_nodes()) {
      if (node->IsPartitionedCall() &&
          node->attrs().Find(kAttribute) != nullptr) {
        calls.push_back(node);
      }
    }
    if (calls.empty()) return absl::OkStatus();
    // The kernels are for the CPU; elsewhere the tables may be on another
    // device.
    if (options.device_set != nullptr) {
      for (const tensorflow::Device* device : options.device_set->devices()) {
        if (device->device_type() != "CPU") return absl::OkStatus();
      }
    }
    for (Node* call : calls) {
      std::string kernel;
      if (tensorflow::TryGetNodeAttr(call->attrs(), kAttribute, &kernel)) {
        Replace(graph, call, kernel);
      }
    }
    return absl::OkStatus();
  }
};

// The inputs of a concatenation along the columns of matrices, in order; none if
// it is along another axis.
std::vector<const Edge*> ColumnsOf(const Node* concat) {
  std::vector<const Edge*> inputs;
  int n;
  const Edge* axis;
  if (!tensorflow::TryGetNodeAttr(concat->attrs(), "N", &n) ||
      !concat->input_edge(n, &axis).ok() || !axis->src()->IsConstant()) {
    return inputs;
  }
  const tensorflow::TensorProto* proto;
  tensorflow::Tensor value;
  if (!tensorflow::TryGetNodeAttr(axis->src()->attrs(), "value", &proto) ||
      !value.FromProto(*proto) || value.NumElements() != 1) {
    return inputs;
  }
  const int64_t number = value.dtype() == tensorflow::DT_INT64
                             ? value.flat<int64_t>()(0)
                             : value.flat<int32_t>()(0);
  if (number != 1 && number != -1) return inputs;
  for (int i = 0; i < n; ++i) {
    const Edge* edge;
    if (!concat->input_edge(i, &edge).ok()) return {};
    inputs.push_back(edge);
  }
  return inputs;
}

// A lookup, the concatenation of all its vectors, and what only passes them on
// from one to the other.
struct Fused {
  Node* lookup = nullptr;
  Node* concat;
  std::unordered_set<Node*> between;
  std::vector<int> order;           // See TfrsEmbedLookupConcat.
  std::vector<const Edge*> others;  // Inputs of the concatenation.

  bool Has(const Node* node) const {
    return node == lookup || node == concat ||
           between.count(const_cast<Node*>(node)) > 0;
  }

  // All but the concatenation.
  std::vector<Node*> Before() const {
    std::vector<Node*> nodes(between.begin(), between.end());
    nodes.push_back(lookup);
    return nodes;
  }
};

// Where an input comes from; adds the nodes that only pass it on.
const Edge* Origin(const Edge* edge, std::vector<Node*>* passed) {
  const Edge* before;
  while ((edge->src()->type_string() == "Identity" ||
          edge->src()->type_string() == "IdentityN") &&
         edge->src()->input_edge(edge->src_output(), &before).ok()) {
    passed->push_back(edge->src());
    edge = before;
  }
  return edge;
}

// Finds the first lookup among the inputs of a concatenation.
Fused Find(Node* concat) {
  Fused found;
  found.concat = concat;
  for (const Edge* edge : ColumnsOf(concat)) {
    std::vector<Node*> passed;
    const Edge* origin = Origin(edge, &passed);
    Node* from = origin->src();
    if (found.lookup == nullptr && from->type_string() == "TfrsEmbedLookup") {
      found.lookup = from;
      // Numbers of others begin after the lookup's, which are known only now.
      for (int& i : found.order) i += from->num_outputs();
    }
    if (from == found.lookup) {
      found.between.insert(passed.begin(), passed.end());
      found.order.push_back(origin->src_output());
    } else {
      const int first = found.lookup ? found.lookup->num_outputs() : 0;
      found.order.push_back(first + found.others.size());
      found.others.push_back(edge);
    }
  }
  return found;
}

// Whether a lookup's vectors are matrices that are concatenated, each once, and
// go nowhere else.
bool AllAreConcatenated(const Fused& fused) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  const Node* lookup = fused.lookup;
  if (!tensorflow::GetNodeAttr(lookup->attrs(), "shapes", &shapes).ok()) {
    return false;
  }
  for (const auto& shape : shapes) {
    if (shape.dims() != 2) return false;
  }
  std::vector<int> uses(lookup->num_outputs(), 0);
  for (int i : fused.order) {
    if (i < lookup->num_outputs()) ++uses[i];
  }
  for (int number : uses) {
    if (number != 1) return false;
  }
  for (const Node* node : fused.Before()) {
    for (const Edge* edge : node->out_edges()) {
      if (!edge->IsControlEdge() && !fused.Has(edge->dst())) return false;
    }
  }
  for (const Edge* edge : fused.others) {
    if (fused.Has(edge->src())) return false;  // It passes others on as well.
  }
  return true;
}

// Whether something else has to run after one of the nodes and before another.
bool SomethingBetween(const Fused& fused) {
  std::vector<const Node*> found;
  std::unordered_set<const Node*> seen;
  auto add = [&](const Node* from) {
    for (const Edge* edge : from->out_edges()) {
      if (fused.Has(from) && fused.Has(edge->dst())) continue;
      if (seen.insert(edge->dst()).second) found.push_back(edge->dst());
    }
  };
  for (const Node* node : fused.Before()) add(node);
  while (!found.empty()) {
    const Node* node = found.back();
    found.pop_back();
    if (fused.Has(node)) return true;
    add(node);
  }
  return false;
}

// Makes one operation of a concatenation and the lookup whose vectors are all
// among its inputs, if there is one.
void FuseConcat(Graph* graph, Node* concat) {
  const Fused fused = Find(concat);
  const Node* lookup = fused.lookup;
  if (lookup == nullptr || !AllAreConcatenated(fused) ||
      lookup->assigned_device_name() != concat->assigned_device_name() ||
      SomethingBetween(fused)) {
    return;
  }
  NodeDef def = lookup->def();
  def.set_name(graph->NewName(lookup->name()));
  def.set_op("TfrsEmbedLookupConcat");
  def.clear_input();
  def.mutable_attr()->erase("shapes");
  tensorflow::AddNodeAttr("O", static_cast<int>(fused.others.size()), &def);
  tensorflow::AddNodeAttr("order", fused.order, &def);
  absl::Status status;
  Node* node = graph->AddNode(def, &status);
  if (!status.ok()) return;
  node->set_assigned_device_name(lookup->assigned_device_name());
  for (const Edge* edge : lookup->in_edges()) {
    if (edge->IsControlEdge()) continue;
    graph->AddEdge(edge->src(), edge->src_output(), node, edge->dst_input());
  }
  int input = lookup->num_inputs();
  for (const Edge* edge : fused.others) {
    graph->AddEdge(edge->src(), edge->src_output(), node, input++);
  }
  MoveOutputs(graph, concat, node);
  std::vector<Node*> replaced = fused.Before();
  replaced.push_back(concat);
  for (Node* old : replaced) {
    for (const Edge* edge : old->in_edges()) {
      if (edge->IsControlEdge() && !fused.Has(edge->src())) {
        graph->AddControlEdge(edge->src(), node);
      }
    }
    for (const Edge* edge : old->out_edges()) {
      if (edge->IsControlEdge() && !fused.Has(edge->dst())) {
        graph->AddControlEdge(node, edge->dst());
      }
    }
  }
  for (Node* old : replaced) graph->RemoveNode(old);
}

// Where a lookup's ids are among its inputs.
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

// Lets a lookup check its ids by itself if all that an operation checks goes to
// that lookup and nowhere else, as where nothing is trained.
void FuseCheck(Graph* graph, Node* check) {
  Node* lookup = nullptr;
  std::unordered_set<int> passed;
  for (const Edge* edge : check->out_edges()) {
    if (lookup == nullptr) lookup = edge->dst();
    if (edge->dst() != lookup) return;
    if (!edge->IsControlEdge()) passed.insert(edge->src_output());
  }
  if (lookup == nullptr ||
      (lookup->type_string() != "TfrsEmbedLookup" &&
       lookup->type_string() != "TfrsEmbedLookupConcat") ||
      lookup->assigned_device_name() != check->assigned_device_name() ||
      static_cast<int>(passed.size()) != check->num_outputs()) {
    return;
  }
  // Which of the checked ids each feature has.
  std::vector<int64_t> rows, rows_of;
  std::vector<std::string> names, names_of;
  int begin, end;
  if (!FindIds(lookup, &begin, &end) ||
      !tensorflow::GetNodeAttr(check->attrs(), "rows", &rows).ok() ||
      !tensorflow::GetNodeAttr(check->attrs(), "names", &names).ok() ||
      static_cast<int>(rows.size()) != check->num_outputs() ||
      static_cast<int>(names.size()) != check->num_outputs()) {
    return;
  }
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

class Fuse : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || *options.graph == nullptr) {
      return absl::OkStatus();
    }
    Graph* graph = options.graph->get();
    std::vector<Node*> concats, checks;
    for (Node* node : graph->op_nodes()) {
      if (node->type_string() == "ConcatV2") concats.push_back(node);
      if (node->type_string() == "TfrsEmbedRequire") checks.push_back(node);
    }
    for (Node* concat : concats) FuseConcat(graph, concat);
    for (Node* check : checks) FuseCheck(graph, check);
    return absl::OkStatus();
  }
};

// Once before the graph is optimized and once after, when functions that it
// calls have become part of it.
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_PLACEMENT, 0, UseKernels);
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 0,
    UseKernels);
// After that, when TensorFlow has made one concatenation of several and left
// out what does nothing.
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 1, Fuse);

}  // namespace
}  // namespace tfrs_embed
