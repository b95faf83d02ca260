// Edges of graphs, for the passes that replace nodes.

#ifndef TFRS_EMBED_KERNELS_CC_GRAPH_EDGES_H_
#define TFRS_EMBED_KERNELS_CC_GRAPH_EDGES_H_

#include <vector>

#include "tensorflow/core/graph/graph.h"

namespace tfrs_embed {

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
