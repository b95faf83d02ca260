// Nodes and edges of graphs, for the passes that replace nodes.

#ifndef TFRS_EMBED_KERNELS_CC_GRAPH_EDGES_H_
#define TFRS_EMBED_KERNELS_CC_GRAPH_EDGES_H_

#include <vector>

#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

// The operations of a pass's graph that a condition holds for; none where the
// pass has no graph. A list, as passes add and remove nodes.
template <typename Condition>
std::vector<tensorflow::Node*> FindNodes(
    const tensorflow::GraphOptimizationPassOptions& options,
    const Condition& condition) {
  std::vector<tensorflow::Node*> found;
  if (options.graph == nullptr || *options.graph == nullptr) return found;
  for (tensorflow::Node* node : (*options.graph)->op_nodes()) {
    if (condition(node)) found.push_back(node);
  }
  return found;
}

// Moves the outgoing edges of a node, control edges too, to another node.
inline void MoveOutputs(tensorflow::Graph* graph, tensorflow::Node* from,
                        tensorflow::Node* to) {
  const std::vector<const tensorflow::Edge*> edges(from->out_edges().begin(),
                                                   from->out_edges().end());
  for (const tensorflow::Edge* edge : edges) {
    tensorflow::Node* taker = edge->dst();
    const int output = edge->src_output(), input = edge->dst_input();
    graph->RemoveEdge(edge);
    graph->AddEdge(to, output, taker, input);
  }
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_GRAPH_EDGES_H_
