// Answers requests with a SavedModel, without Python.
//
//   server FOLDER
//
// It loads the model by TensorFlow's C API and listens on a free port of the
// loopback interface, which it prints. A request is a line for each input of
// the signature "serving_default": its name, its dimensions and its values,
//
//   user_id 3 196 186 22
//
// and an empty line. The first line may name another signature:
//
//   @apply_delta
//   path scalar /models/ratings/deltas/7
//
// An answer is a line for each output, of the same form; or it is one line,
// "error" and what is wrong. It ends with an empty line, too. A connection may
// make many requests, and each connection has a thread.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tensorflow/c/c_api.h"
#include "tensorflow/core/platform/ctstring.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace {

// Frees a tensor, and the strings that the server made.
void Delete(TF_Tensor* tensor) {
  if (TF_TensorType(tensor) == TF_STRING) {
    auto* strings = static_cast<TF_TString*>(TF_TensorData(tensor));
    const int64_t count = TF_TensorElementCount(tensor);
    for (int64_t i = 0; i < count; ++i) TF_TString_Dealloc(&strings[i]);
  }
  TF_DeleteTensor(tensor);
}

using Tensor = std::unique_ptr<TF_Tensor, decltype(&TF_DeleteTensor)>;
using Given = std::unique_ptr<TF_Tensor, decltype(&Delete)>;
using Status = std::unique_ptr<TF_Status, decltype(&TF_DeleteStatus)>;

// Throws if TensorFlow failed.
void Check(const Status& status) {
  if (TF_GetCode(status.get()) != TF_OK) {
    throw std::runtime_error(TF_Message(status.get()));
  }
}

// A tensor of the values that a line goes on with.
template <typename T>
void Read(std::istringstream& line, TF_Tensor* tensor, int64_t count) {
  T* data = static_cast<T*>(TF_TensorData(tensor));
  for (int64_t i = 0; i < count; ++i) {
    if (!(line >> data[i])) throw std::runtime_error("too few values");
  }
}

// A scalar: the rest of the line, in which there may be spaces.
void ReadString(std::istringstream& line, TF_Tensor* tensor, int64_t count) {
  auto* strings = static_cast<TF_TString*>(TF_TensorData(tensor));
  for (int64_t i = 0; i < count; ++i) TF_TString_Init(&strings[i]);
  std::string text;
  if (count != 1 || !std::getline(line >> std::ws, text)) {
    throw std::runtime_error("not a single string");
  }
  TF_TString_Copy(strings, text.data(), text.size());
}

template <typename T>
void Write(std::ostringstream& line, const TF_Tensor* tensor) {
  const T* data = static_cast<const T*>(TF_TensorData(tensor));
  const int64_t count = TF_TensorElementCount(tensor);
  for (int64_t i = 0; i < count; ++i) line << ' ' << data[i];
}

class Model {
 public:
  explicit Model(const std::string& folder)
      : graph_(TF_NewGraph()) {
    const Status status(TF_NewStatus(), TF_DeleteStatus);
    const char* tags[] = {"serve"};
    TF_Buffer* buffer = TF_NewBuffer();
    TF_SessionOptions* options = TF_NewSessionOptions();
    session_ = TF_LoadSessionFromSavedModel(options, nullptr, folder.c_str(),
                                            tags, 1, graph_, buffer,
                                            status.get());
    TF_DeleteSessionOptions(options);
    Check(status);
    tensorflow::MetaGraphDef meta_graph;
    meta_graph.ParseFromArray(buffer->data, buffer->length);
    TF_DeleteBuffer(buffer);
    signatures_ = {meta_graph.signature_def().begin(),
                   meta_graph.signature_def().end()};
  }

  // Answers a request: the lines of both are as in the comment above.
  std::string Answer(std::vector<std::string> request) const {
    std::string called = "serving_default";
    if (!request.empty() && request[0][0] == '@') {
      called = request[0].substr(1);
      request.erase(request.begin());
    }
    const auto found_signature = signatures_.find(called);
    if (found_signature == signatures_.end()) {
      throw std::runtime_error("the model has no signature '" + called + "'");
    }
    const tensorflow::SignatureDef& signature = found_signature->second;
    std::vector<TF_Output> inputs, outputs;
    std::vector<Given> given;
    std::vector<TF_Tensor*> values;
    for (const std::string& text : request) {
      std::istringstream line(text);
      std::string name;
      line >> name;
      const auto input = signature.inputs().find(name);
      if (input == signature.inputs().end()) {
        throw std::runtime_error("the model has no input '" + name + "'");
      }
      inputs.push_back(Find(input->second.name()));
      try {
        given.push_back(Parse(line, input->second));
      } catch (const std::runtime_error& error) {
        throw std::runtime_error("input '" + name + "': " + error.what());
      }
      values.push_back(given.back().get());
    }
    if (static_cast<int>(inputs.size()) != signature.inputs_size()) {
      throw std::runtime_error(
          "the model takes " + std::to_string(signature.inputs_size()) +
          " inputs, got " + std::to_string(inputs.size()));
    }
    // In the order of their names.
    const std::map<std::string, tensorflow::TensorInfo> by_name(
        signature.outputs().begin(), signature.outputs().end());
    for (const auto& output : by_name) {
      outputs.push_back(Find(output.second.name()));
    }
    std::vector<TF_Tensor*> found(outputs.size(), nullptr);
    const Status status(TF_NewStatus(), TF_DeleteStatus);
    TF_SessionRun(session_, nullptr, inputs.data(), values.data(),
                  inputs.size(), outputs.data(), found.data(), found.size(),
                  nullptr, 0, nullptr, status.get());
    Check(status);
    std::ostringstream answer;
    answer.precision(9);  // A float32's digits.
    size_t i = 0;
    for (const auto& output : by_name) {
      const Tensor tensor(found[i++], TF_DeleteTensor);
      answer << output.first << ' ';
      if (TF_NumDims(tensor.get()) == 0) answer << "scalar";
      for (int d = 0; d < TF_NumDims(tensor.get()); ++d) {
        answer << (d ? "x" : "") << TF_Dim(tensor.get(), d);
      }
      switch (TF_TensorType(tensor.get())) {
        case TF_FLOAT: Write<float>(answer, tensor.get()); break;
        case TF_INT32: Write<int32_t>(answer, tensor.get()); break;
        case TF_INT64: Write<int64_t>(answer, tensor.get()); break;
        default: throw std::runtime_error("an output is of another dtype");
      }
      answer << '\n';
    }
    return answer.str();
  }

 private:
  // The place in the graph that is called "operation:index".
  TF_Output Find(const std::string& name) const {
    const size_t colon = name.rfind(':');
    return {TF_GraphOperationByName(graph_, name.substr(0, colon).c_str()),
            std::stoi(name.substr(colon + 1))};
  }

  static Given Parse(std::istringstream& line,
                     const tensorflow::TensorInfo& info) {
    std::string shape, size;
    line >> shape;
    std::vector<int64_t> dims;
    int64_t count = 1;
    if (shape == "scalar") shape.clear();
    for (std::istringstream sizes(shape); std::getline(sizes, size, 'x');) {
      dims.push_back(std::stoll(size));
      count *= dims.back();
    }
    const auto dtype = static_cast<TF_DataType>(info.dtype());
    const size_t bytes =
        count * (dtype == TF_STRING ? sizeof(TF_TString)
                                    : TF_DataTypeSize(dtype));
    Given tensor(
        TF_AllocateTensor(dtype, dims.data(), dims.size(), bytes), Delete);
    switch (dtype) {
      case TF_STRING: ReadString(line, tensor.get(), count); break;
      case TF_FLOAT: Read<float>(line, tensor.get(), count); break;
      case TF_INT32: Read<int32_t>(line, tensor.get(), count); break;
      case TF_INT64: Read<int64_t>(line, tensor.get(), count); break;
      default: throw std::runtime_error("the model takes another dtype");
    }
    return tensor;
  }

  TF_Graph* graph_;
  TF_Session* session_;
  std::map<std::string, tensorflow::SignatureDef> signatures_;
};

// Serves a connection until the client closes it.
void Serve(const Model& model, int connection) {
  std::string pending;
  std::vector<std::string> request;
  char buffer[1 << 16];
  for (ssize_t size; (size = read(connection, buffer, sizeof buffer)) > 0;) {
    pending.append(buffer, size);
    for (size_t end; (end = pending.find('\n')) != std::string::npos;) {
      const std::string line = pending.substr(0, end);
      pending.erase(0, end + 1);
      if (!line.empty()) {
        request.push_back(line);
        continue;
      }
      std::string answer;
      try {
        answer = model.Answer(request);
      } catch (const std::exception& error) {
        answer = std::string("error ") + error.what();
        for (char& c : answer) c = c == '\n' ? ' ' : c;
        answer += '\n';
      }
      request.clear();
      answer += '\n';
      for (size_t sent = 0; sent < answer.size();) {
        const ssize_t n =
            send(connection, answer.data() + sent, answer.size() - sent,
                 MSG_NOSIGNAL);
        if (n <= 0) {
          close(connection);
          return;
        }
        sent += n;
      }
    }
  }
  close(connection);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: server FOLDER\n";
    return 2;
  }
  try {
    const Model model(argv[1]);
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    socklen_t length = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* general = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, general, length) || listen(listener, 8) ||
        getsockname(listener, general, &length)) {
      throw std::runtime_error(std::strerror(errno));
    }
    std::cout << ntohs(address.sin_port) << std::endl;
    while (true) {
      const int connection = accept(listener, nullptr, nullptr);
      if (connection < 0) continue;
      std::thread(Serve, std::cref(model), connection).detach();
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
