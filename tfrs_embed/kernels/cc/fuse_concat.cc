// A pass that makes one operation of a lookup and the concatenation of all its
// vectors. The vectors then are written to their columns at once.

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "graph_edges.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

namespace {

// The inputs of a concatenation along axis 1 or -1, in order; none if it is
// along another axis.
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
  // Few bytes may say that they are a tensor of any size, or another type.
  if (!tensorflow::TryGetNodeAttr(axis->src()->attrs(), "value", &proto) ||
      proto->tensor_shape().dim_size() != 0 || !value.FromProto(*proto)) {
    return inputs;
  }
  int64_t number = 0;
  if (value.dtype() == tensorflow::DT_INT64) number = value.flat<int64_t>()(0);
  if (value.dtype() == tensorflow::DT_INT32) number = value.flat<int32_t>()(0);
  if (number != 1 && number != -1) return inputs;
  for (int i = 0; i < n; ++i) {
    const Edge* edge;
    if (!concat->input_edge(i, &edge).ok()) return {};
    inputs.push_back(edge);
  }
  return inputs;
}

// A lookup, the concatenation of all its vectors, and the nodes between them,
// which only pass vectors on.
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

// The edge that an input comes from, past nodes that only pass it on. Adds
// these nodes to `passed`.
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
      // The numbers of others begin where those of the lookup's vectors end.
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

// Whether each of a lookup's vectors is a matrix that is concatenated once and
// goes nowhere else.
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

// Whether another node has to run after one of the nodes and before another of
// them.
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

// Fuses a concatenation with the lookup whose vectors are all among its inputs,
// if there is one.
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

class FuseConcats : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    const auto chosen = [](const Node* node) {
      return node->type_string() == "ConcatV2";
    };
    for (Node* node : FindNodes(options, chosen)) {
      FuseConcat(options.graph->get(), node);
    }
    return absl::OkStatus();
  }
};

// Last, when TensorFlow has made one concatenation of several and removed what
// does nothing, and after replace_calls.cc.
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 1,
    FuseConcats);

}  // namespace
}  // namespace tfrs_embed
