// A pass that puts kernels into graphs.
//
// A graph that may be exported calls a function of TensorFlow's operations. The
// call has the kernel's node as an attribute, which other programs ignore.
// Where this library is loaded, the pass replaces the call just before it runs.

#include <string>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "graph_edges.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

namespace {

constexpr char kAttribute[] = "_tfrs_embed_kernel";

// Replaces a call by its kernel's node; leaves the call if that isn't a node of
// this library, or the types of inputs or outputs don't fit.
void Replace(Graph* graph, Node* call, const std::string& kernel) {
  NodeDef def;
  if (!def.ParseFromString(kernel)) return;
  // Another operation here would be seen by nothing that looks through a graph.
  if (!absl::StartsWith(def.op(), "TfrsEmbed")) return;
  def.set_name(call->name());
  def.set_device(call->requested_device());
  def.clear_input();
  // An export by an earlier release may lack newer attributes.
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

// Whether there are CPUs alone. The kernels are for them; elsewhere the tables
// may be on another device.
bool OnlyCpus(const tensorflow::GraphOptimizationPassOptions& options) {
  if (options.device_set == nullptr) return true;
  for (const tensorflow::Device* device : options.device_set->devices()) {
    if (device->device_type() != "CPU") return false;
  }
  return true;
}

// Keeps TensorFlow from replacing calls by what the functions do, and from moving
// constant inputs into the functions. Without this library it may: running a
// function takes longer.
class KeepCalls : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    auto* library = options.flib_def;
    if (library == nullptr) return absl::OkStatus();
    std::unordered_set<std::string> called;
    const auto find = [&](const NodeDef& node) {
      const auto function = node.attr().find("f");
      if (node.attr().contains(kAttribute) && function != node.attr().end()) {
        called.insert(function->second.func().name());
      }
    };
    for (const std::string& name : library->ListFunctionNames()) {
      for (const NodeDef& node : library->Find(name)->node_def()) find(node);
    }
    if (options.graph != nullptr && *options.graph != nullptr) {
      for (const Node* node : (*options.graph)->op_nodes()) find(node->def());
    }
    if (called.empty() || !OnlyCpus(options)) return absl::OkStatus();
    for (const std::string& name : called) {
      const tensorflow::FunctionDef* found = library->Find(name);
      if (found == nullptr) continue;
      tensorflow::FunctionDef function = *found;
      for (const char* attribute : {"_noinline", "_nospecialize"}) {
        (*function.mutable_attr())[attribute].set_b(true);
      }
      TF_RETURN_IF_ERROR(library->ReplaceFunction(name, function));
    }
    return absl::OkStatus();
  }
};

class ReplaceCalls : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    const std::vector<Node*> calls = FindNodes(options, [](const Node* node) {
      return node->IsPartitionedCall() &&
             node->attrs().Find(kAttribute) != nullptr;
    });
    if (calls.empty() || !OnlyCpus(options)) return absl::OkStatus();
    for (Node* call : calls) {
      std::string kernel;
      if (tensorflow::TryGetNodeAttr(call->attrs(), kAttribute, &kernel)) {
        Replace(options.graph->get(), call, kernel);
      }
    }
    return absl::OkStatus();
  }
};

// Before TensorFlow replaces calls.
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::PRE_PLACEMENT, 0,
                      KeepCalls);
// Once before the graph is optimized, and once after: then functions that it
// calls have become part of it.
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_PLACEMENT, 0,
                      ReplaceCalls);
REGISTER_OPTIMIZATION(
    tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 0,
    ReplaceCalls);

}  // namespace
}  // namespace tfrs_embed
