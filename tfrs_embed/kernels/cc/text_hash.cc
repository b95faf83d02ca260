// Rows of hashed features: hashes of ids' texts, modulo the number of rows.
//
// They are those of TensorFlow's AsString with StringToHashBucketFast, which is
// FarmHash's Fingerprint64, or StringToHashBucketStrong, which is SipHash-2-4
// (Aumasson and Bernstein 2012, "SipHash: a Fast Short-Input PRF").

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/string_view.h"
#include "op.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/platform/tstring.h"
#include "threads.h"

namespace util {

// Of TensorFlow's library. Compilers don't find its header in the wheels.
uint64_t Fingerprint64(const char* text, size_t size);

}  // namespace util

namespace tfrs_embed {

namespace {

// This many ids become texts before the first of them is hashed: a processor
// waits for bytes that were just written if it reads them in other groups.
constexpr int64_t kBlock = 128;
constexpr int64_t kMostDigits = 24;  // In groups of eight.

// The texts of the numbers below 10,000, of four digits each, the first in the
// lowest byte.
const uint32_t* Fours() {
  static const auto* const texts = [] {
    auto* made = new std::vector<uint32_t>(10000);
    for (uint32_t i = 0; i < made->size(); ++i) {
      (*made)[i] = 0x30303030 + (i / 1000 | i / 100 % 10 << 8 |
                                 i / 10 % 10 << 16 | i % 10 << 24);
    }
    return made;
  }();
  return texts->data();
}

// Writes a number's digits up to `end`, and zeros before them; returns where the
// digits begin.
char* WriteDigits(uint64_t number, const uint32_t* fours, char* end) {
  uint64_t eight;
  do {
    const uint64_t rest = number / 100000000;
    const uint32_t low = number - 100000000 * rest;
    eight = fours[low / 10000] | uint64_t{fours[low % 10000]} << 32;
    end -= 8;
    std::memcpy(end, &eight, 8);
    number = rest;
  } while (number > 0);
  // The zeros before the first digit; the last one may be the number.
  eight ^= 0x3030303030303030;
  return end + __builtin_ctzll(eight | uint64_t{1} << 56) / 8;
}

// The texts of a block of ids.
class Texts {
 public:
  template <typename Id>
  void Set(const Id* ids, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const bool negative = ids[i] < 0;
      const auto bits = static_cast<uint64_t>(ids[i]);
      char* const end = digits_[i] + kMostDigits;
      char* begin = WriteDigits(negative ? 0 - bits : bits, fours_, end);
      // Without a branch, which random signs would make slow.
      begin[-1] = '-';
      begin -= negative;
      texts_[i] = absl::string_view(begin, end - begin);
    }
  }

  void Set(const tensorflow::tstring* ids, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      texts_[i] = absl::string_view(ids[i].data(), ids[i].size());
    }
  }

  absl::string_view operator[](int64_t i) const { return texts_[i]; }

 private:
  const uint32_t* const fours_ = Fours();
  char digits_[kBlock][kMostDigits];
  absl::string_view texts_[kBlock];
};

class SipHash {
 public:
  SipHash(uint64_t key0, uint64_t key1)
      : v0_(key0 ^ 0x736f6d6570736575),
        v1_(key1 ^ 0x646f72616e646f6d),
        v2_(key0 ^ 0x6c7967656e657261),
        v3_(key1 ^ 0x7465646279746573) {}

  // The hash of a text, by a copy of the state.
  uint64_t operator()(absl::string_view text) const {
    SipHash state = *this;
    const char* const bytes = text.data();
    const size_t size = text.size(), words = size / 8 * 8, rest = size - words;
    for (size_t i = 0; i < words; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      state.Add(word);
    }
    // The rest, with the size in the last byte.
    uint64_t last = 0;
    if (words > 0 && rest > 0) {
      std::memcpy(&last, bytes + size - 8, 8);
      last >>= 64 - 8 * rest;
    } else {
      for (size_t i = 0; i < rest; ++i) {
        last |= uint64_t{static_cast<uint8_t>(bytes[i])} << 8 * i;
      }
    }
    state.Add(last | uint64_t{size} << 56);
    state.v2_ ^= 0xff;
    for (int i = 0; i < 4; ++i) state.Round();
    return state.v0_ ^ state.v1_ ^ state.v2_ ^ state.v3_;
  }

 private:
  static uint64_t Rotate(uint64_t v, int bits) {
    return v << bits | v >> (64 - bits);
  }

  void Round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = Rotate(v1_, 13) ^ v0_;
    v3_ = Rotate(v3_, 16) ^ v2_;
    v0_ = Rotate(v0_, 32) + v3_;
    v2_ += v1_;
    v1_ = Rotate(v1_, 17) ^ v2_;
    v3_ = Rotate(v3_, 21) ^ v0_;
    v2_ = Rotate(v2_, 32);
  }

  void Add(uint64_t word) {
    v3_ ^= word;
    Round();
    Round();
    v0_ ^= word;
  }

  uint64_t v0_, v1_, v2_, v3_;
};

class HashOp : public OpKernel {
 public:
  explicit HashOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("buckets", &buckets_));
    std::vector<int64_t> salts;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("salts", &salts));
    const size_t outputs = ctx->num_outputs();
    OP_REQUIRES(ctx, salts.size() == (salts.empty() ? 0 : 2 * outputs),
                InvalidArgument(salts.size(), " numbers of salts for ",
                                outputs, " rows of an id"));
    OP_REQUIRES(ctx, !salts.empty() || outputs == 1,
                InvalidArgument(outputs, " rows of an id without salts"));
    for (size_t i = 0; i < salts.size(); i += 2) {
      salted_.emplace_back(salts[i], salts[i + 1]);
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    std::vector<int64_t*> rows;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, ids.shape(), &out));
      rows.push_back(out->flat<int64_t>().data());
    }
    switch (ids.dtype()) {
#define TFRS_HASH(Id)                         \
  case tensorflow::DataTypeToEnum<Id>::value: \
    return Hash(ctx, static_cast<const Id*>(ids.data()), ids.NumElements(), rows);
      TF_CALL_INTEGRAL_TYPES(TFRS_HASH)
      TF_CALL_tstring(TFRS_HASH)
#undef TFRS_HASH
      default:
        ctx->SetStatus(InvalidArgument("ids must be integers or strings"));
    }
  }

 private:
  template <typename Id>
  void Hash(OpKernelContext* ctx, const Id* ids, int64_t total,
            const std::vector<int64_t*>& rows) const {
    const int64_t cost = 40 * rows.size();
    const uint64_t buckets = buckets_;
    ParallelFor(ctx, total, cost, [&](int64_t begin, int64_t end) {
      Texts texts;
      for (; begin < end; begin += kBlock) {
        const int64_t n = std::min(kBlock, end - begin);
        texts.Set(ids + begin, n);
        for (size_t r = 0; r < rows.size(); ++r) {
          int64_t* const out = rows[r] + begin;
          if (salted_.empty()) {
            for (int64_t i = 0; i < n; ++i) {
              out[i] = util::Fingerprint64(texts[i].data(), texts[i].size()) %
                       buckets;
            }
          } else {
            for (int64_t i = 0; i < n; ++i) {
              out[i] = salted_[r](texts[i]) % buckets;
            }
          }
        }
      }
    });
  }

  int64_t buckets_;
  std::vector<SipHash> salted_;
};

}  // namespace

REGISTER_OP("TfrsEmbedHash")
    .Input("ids: T")
    .Output("rows: N * int64")
    .Attr("N: int >= 1")
    .Attr(
        "T: {int8, int16, int32, int64, uint8, uint16, uint32, uint64, string}")
    .Attr("buckets: int >= 1")
    .Attr("salts: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(0));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedHash", HashOp);

}  // namespace tfrs_embed
