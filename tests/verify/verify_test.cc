// verify_paths: cases of foci.attention and refuse, what is reported, and broken files.
#include "foci/verify/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>

#include "foci/io/file.h"
#include "foci/reference/attention.h"
#include "foci/spec/json.h"
#include "reference/sweep.h"
#include "verify/case_writer.h"
#include "verify/engine_built.h"

namespace foci::testing {
namespace {

// A sweep case with everything that the oracle says about it.
NamedTensors with_answers(const SweepCase& c) {
  const reference::Forward f = reference::attention_forward(c.spec, c.in);
  const AttentionGradients g = reference::attention_backward(c.spec, c.in, c.up);
  const bool sparse = c.spec.normalizer.index() == 1 || c.spec.normalizer.index() == 2;
  const AttentionInputs& in = c.in;
  const bool two_tables = in.table1d.defined() && in.table2d.defined();
  return {{"in.q", in.q},
          {"in.k", in.k},
          {"in.v", in.v},
          {"in.key_lengths", in.key_lengths},
          {"in.past_lengths", in.past_lengths},
          {"in.q_segments", in.q_segments},
          {"in.k_segments", in.k_segments},
          {"in.keep", in.keep},
          {"in.bias", in.bias},
          {"in.slopes", in.slopes},
          {two_tables ? "in.table1d" : "in.table", in.table1d},
          {two_tables ? "in.table2d" : "in.table", in.table2d},
          {"in.score_w", in.score_w},
          {"in.dy", c.up.dy},
          {sparse ? "in.dtau" : "in.dlse", c.up.drow_stat},
          {"in.dentropy", c.up.dentropy},
          {"in.dmax_weight", c.up.dmax_weight},
          {"in.dcoverage", c.up.dcoverage},
          {"out.y", f.out.y},
          {"out.weights", f.weights},
          {sparse ? "out.tau" : "out.lse", f.out.row_stat},
          {"out.entropy", f.out.entropy},
          {"out.coverage", f.out.coverage},
          {"out.max_weight", f.out.max_weight},
          {"out.support", f.out.support},
          {"out.dq", g.dq},
          {"out.dk", g.dk},
          {"out.dv", g.dv},
          {"out.dbias", g.dbias},
          {"out.dslopes", g.dslopes},
          {two_tables ? "out.dtable1d" : "out.dtable", g.dtable1d},
          {two_tables ? "out.dtable2d" : "out.dtable", g.dtable2d},
          {"out.dscore_w", g.dscore_w},
          {"out.dscale", g.dscale},
          {"out.dalpha", g.dalpha}};
}

class Verify : public ::testing::Test {
 protected:
  std::string run(const std::string& op, const std::string& attributes, const NamedTensors& tensors,
                  std::map<std::string, std::string> more = {}) {
    write_case(path_, op, attributes, tensors, std::move(more));
    return verdict(path_);
  }

  TemporaryFolder folder_;
  const std::filesystem::path path_ = folder_ / "case.safetensors";
};

const NamedTensors kSmall = {{"in.q", Tensor::full({1, 1, 1, 1}, 1)},
                             {"in.k", Tensor::full({1, 1, 2, 1}, 1)},
                             {"in.v", Tensor::from<float>({2, 4}, {1, 1, 2, 1})}};

NamedTensors small_with(NamedTensors more) {
  more.insert(more.begin(), kSmall.begin(), kSmall.end());
  return more;
}

TEST_F(Verify, SweepCasesPassOnTheOracle) {
  for (int n = 0; n < 60; ++n) {
    const SweepCase c = sweep_case(n, DType::f32);
    ASSERT_EQ(run("foci.attention", spec_to_json_text(c.spec), with_answers(c)), "passed")
        << c.text;
  }
}

TEST_F(Verify, EveryOutputIsCompared) {
  int changed = 0;
  for (int n = 0; n < 6; ++n) {
    const SweepCase c = sweep_case(n, DType::f32);
    const NamedTensors right = with_answers(c);
    for (size_t t = 0; t < right.size(); ++t) {
      if (right[t].first.rfind("out.", 0) != 0 || !right[t].second.defined()) continue;
      NamedTensors wrong = right;
      wrong[t].second = wrong[t].second.to(DType::f64).clone();
      wrong[t].second.data<double>()[0] += 0.5;
      if (std::isinf(wrong[t].second.data<double>()[0])) wrong[t].second.data<double>()[0] = 0;
      const std::string said = run("foci.attention", spec_to_json_text(c.spec), wrong);
      const std::string name = right[t].first.substr(4);
      ASSERT_EQ(said.rfind("failed: reference: " + name + " [", 0), 0u) << said << "\n" << name;
      ++changed;
    }
  }
  EXPECT_GT(changed, 60);
}

TEST_F(Verify, TheReportSaysWhatAndWhere) {
  write_case(path_, "foci.attention", "{}", small_with({{"out.y", Tensor::full({1, 1, 1, 1}, 5)}}));
  const VerifyReport r = verify_paths({path_}, {.reference = true});
  EXPECT_EQ(r.passed, 0);
  EXPECT_EQ(r.failed, 1);
  EXPECT_EQ(r.runs, 1);
  ASSERT_EQ(r.failures.size(), 1u);
  const VerifyFailure& f = r.failures[0];
  EXPECT_EQ(f.path, path_);
  EXPECT_EQ(f.op, "foci.attention");
  EXPECT_EQ(f.engine, "reference");
  EXPECT_EQ(f.tensor, "y");
  EXPECT_EQ(f.index, Dims({0, 0, 0, 0}));
  EXPECT_EQ(f.got, 3);
  EXPECT_EQ(f.want, 5);
  EXPECT_EQ(f.error, 2);
  EXPECT_EQ(f.allowed, 5 * 2e-5);
  EXPECT_EQ(f.message,
            "reference: y [0, 0, 0, 0] is 3, expected 5 (error 2, allowed 0.0001; 1 of 1 elements "
            "differ)");
}

TEST_F(Verify, ToleranceComesFromTheFile) {
  const NamedTensors near = small_with({{"out.y", Tensor::full({1, 1, 1, 1}, 3.01)}});
  EXPECT_EQ(run("foci.attention", "{}", near, {{"tolerance", "0.01"}}), "passed");
  EXPECT_EQ(run("foci.attention", "{}", near).rfind("failed", 0), 0u);
  EXPECT_EQ(run("foci.attention", "{}", near, {{"tolerance", "lots"}}),
            "unreadable: metadata tolerance: \"lots\" given, a number >= 0 is needed");
  EXPECT_EQ(run("foci.attention", "{}", near, {{"tolerance", "-1"}}),
            "unreadable: metadata tolerance: \"-1\" given, a number >= 0 is needed");
}

TEST_F(Verify, RefuseWantsARefusalAndItsWords) {
  const std::string alpha = R"({"normalizer":{"kind":"entmax","alpha":1}})";
  EXPECT_EQ(run("refuse", alpha, kSmall, {{"message_contains", "alpha"}}), "passed");
  EXPECT_EQ(run("refuse", alpha, kSmall, {{"message_contains", "gamma"}}),
            "failed: refused with \"normalizer.alpha: 1 given, entmax needs alpha > 1 (softmax is "
            "the limit at 1)\", which does not contain \"gamma\"");
  EXPECT_EQ(run("refuse", "{}", kSmall), "failed: reference: accepted, but it must be refused");
  EXPECT_EQ(run("refuse", "{}",
                {{"in.q", Tensor::zeros({1, 3, 2, 4})},
                 {"in.k", Tensor::zeros({1, 2, 2, 4})},
                 {"in.v", Tensor::zeros({1, 2, 2, 4})}},
                {{"message_contains", "heads"}}),
            "passed");
  EXPECT_EQ(run("refuse", R"({"masks":[{"kind":"keep"}]})", kSmall, {{"message_contains", "keep"}}),
            "passed");
}

TEST_F(Verify, WhatIsNoCaseIsUnreadable) {
  EXPECT_EQ(run("Softmax", "{}", kSmall),
            "unreadable: metadata op: \"Softmax\" given, one of Attention, RotaryEmbedding, "
            "foci.attention, refuse is needed");
  EXPECT_EQ(run("foci.attention", "{}", kSmall),
            "unreadable: the case has no out.* tensor, so it checks nothing");
  EXPECT_EQ(run("foci.attention", "{}", small_with({{"out.z", Tensor::zeros({1})}})),
            "unreadable: out.z: no such tensor belongs to this op");
  EXPECT_EQ(run("foci.attention", "{}", small_with({{"in.mask", Tensor::zeros({1})}})),
            "unreadable: in.mask: no such tensor belongs to this op");
  EXPECT_EQ(run("foci.attention", "{}", small_with({{"y", Tensor::zeros({1})}})),
            "unreadable: tensor y: a case holds only in.* and out.*");
  EXPECT_EQ(run("foci.attention", "{}", small_with({{"out.tau", Tensor::zeros({1, 1, 1})}})),
            "unreadable: tau: the normaliser of this case has lse instead");
  write_safetensors(path_, kSmall);
  EXPECT_EQ(verdict(path_), "unreadable: metadata op: missing, so this is no case file");
  write_file(path_, "no safetensors");
  EXPECT_EQ(verdict(path_).rfind("unreadable: ", 0), 0u);
  EXPECT_EQ(verdict(folder_ / "missing").rfind("unreadable: ", 0), 0u);
}

TEST_F(Verify, InvalidSpecsAndShapesFail) {
  const NamedTensors tensors = small_with({{"out.y", Tensor::zeros({1, 1, 1, 1})}});
  EXPECT_EQ(run("foci.attention", R"({"scores":{}})", tensors)
                .rfind("failed: refused: scores: unknown key", 0),
            0u);
  EXPECT_EQ(run("foci.attention", R"({"biases":[{"kind":"alibi"}]})", tensors),
            "failed: reference: refused: slopes: not given, but the spec reads it");
  // Whole numbers are nothing to attend with; the engine's message names the tensor too.
  NamedTensors whole = tensors;
  for (auto& [name, tensor] : whole) {
    if (name == "in.q") tensor = tensor.to(DType::i32);
  }
  const std::string said = run("foci.attention", "{}", whole);
  EXPECT_NE(said.find("q: int32 given, a floating type is needed"), std::string::npos) << said;
  const std::string engine_said = verdict(path_, {});
  EXPECT_NE(engine_said.find("q: int32 given, a floating type is needed"), std::string::npos)
      << engine_said;
}

TEST_F(Verify, FoldersAreSearched) {
  std::filesystem::create_directory(folder_ / "inner");
  EXPECT_EQ(verdict(folder_.path()), "unreadable: the folder holds no .safetensors file");
  const NamedTensors right = small_with({{"out.y", Tensor::full({1, 1, 1, 1}, 3)}});
  const NamedTensors wrong = small_with({{"out.y", Tensor::full({1, 1, 1, 1}, 4)}});
  write_case(folder_ / "inner/b.safetensors", "foci.attention", "{}", right);
  write_case(folder_ / "a.safetensors", "foci.attention", "{}", wrong);
  write_case(folder_ / "c.safetensors", "foci.attention", "{}", right);
  write_file(folder_ / "notes.txt", "not a case");
  const VerifyReport r = verify_paths({folder_.path()}, {.reference = true});
  EXPECT_EQ(r.passed, 2);
  EXPECT_EQ(r.failed, 1);
  EXPECT_TRUE(r.unreadable.empty());
  EXPECT_EQ(r.failures[0].path, folder_ / "a.safetensors");
}

// A few bytes must not make the oracle work for hours or ask for all memory.
TEST_F(Verify, EmptySizesDoNotHideHugeOnes) {
  constexpr int64_t kHuge = int64_t{1} << 33;
  const auto shaped = [](const Dims& q, const Dims& k) {
    return NamedTensors{{"in.q", Tensor::empty(q)},
                        {"in.k", Tensor::empty(k)},
                        {"in.v", Tensor::empty(k)},
                        {"out.y", Tensor::zeros({1})}};
  };
  for (const std::string op : {"foci.attention", "Attention"}) {
    for (const NamedTensors& tensors :
         {shaped({1, 1, kHuge, 0}, {1, 1, kHuge, 0}), shaped({1, kHuge, 0, 1}, {1, kHuge, 0, 1}),
          shaped({0, 1, kHuge, kHuge}, {0, 1, kHuge, kHuge}),
          shaped({kHuge, 1, 1, 0}, {kHuge, 1, 1, 0})}) {
      const std::string said = run(op, "{}", tensors);
      EXPECT_NE(said.find(" too "), std::string::npos) << said;  // large, or many
    }
  }
}

TEST_F(Verify, DamagedFilesNeverCrash) {
  // A file small enough that every byte can be hit, with several kinds of tensors.
  SweepCase c = sweep_case(3, DType::f32, {.batch = 1, .kv_heads = 1, .queries = 2, .keys = 3});
  for (int n = 4; !c.in.bias.defined() || !c.in.key_lengths.defined(); ++n) {
    c = sweep_case(n, DType::f32, {.batch = 1, .kv_heads = 1, .queries = 2, .keys = 3});
  }
  write_case(path_, "foci.attention", spec_to_json_text(c.spec), with_answers(c));
  const std::string whole = read_file(path_);
  const std::filesystem::path broken = folder_ / "broken.safetensors";
  int unreadable = 0;
  const auto read = [&](std::string_view bytes) {
    std::filesystem::remove(broken);  // writing over a file would wait for the disk
    std::ofstream(broken, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
    const VerifyReport r = verify_paths({broken}, {.reference = true});
    EXPECT_EQ(r.passed + r.failed + static_cast<int64_t>(r.unreadable.size()), 1);
    for (const auto& u : r.unreadable) expect_one_line(u.message);
    for (const auto& f : r.failures) expect_one_line(f.message);
    unreadable += static_cast<int>(r.unreadable.size());
  };
  EXPECT_EQ(truncate_everywhere(whole, 7, read).refused, 0);
  EXPECT_EQ(unreadable, static_cast<int>((whole.size() + 6) / 7));
  EXPECT_EQ(flip_bits(whole, 23, read).refused, 0);
  EXPECT_EQ(scramble(whole, 500, read).refused, 0);
}

TEST_F(Verify, RunsTheEngineOnEveryTarget) {
  FOCI_SKIP_WITHOUT_AN_ENGINE();
  write_case(path_, "foci.attention", "{}", small_with({{"out.y", Tensor::full({1, 1, 1, 1}, 3)}}));
  const VerifyReport r = verify_paths({path_});
  EXPECT_EQ(r.passed, 1);
  EXPECT_GE(r.runs, static_cast<int64_t>(supported_targets().size()));
  for (int n = 0; n < 80; ++n) {
    const SweepCase c = sweep_case(n, DType::f32);
    // The gradient is a sum of p^(2−α), which no tolerance bounds where p is small.
    const auto* entmax = std::get_if<Entmax>(&c.spec.normalizer);
    if (entmax && entmax->alpha > 2) continue;
    write_case(path_, "foci.attention", spec_to_json_text(c.spec), with_answers(c),
               {{"tolerance", "5e-5"}});
    ASSERT_EQ(verdict(path_, {}), "passed") << c.text;
  }
}

// Inputs stored in 16 bits; results are asked for in double.
TEST_F(Verify, RunsTheEngineInHalfPrecision) {
  FOCI_SKIP_WITHOUT_AN_ENGINE();
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (int n = 0; n < 30; ++n) {
      const SweepCase c = sweep_case(n, dtype);
      write_case(path_, "foci.attention", spec_to_json_text(c.spec), with_answers(c));
      EXPECT_EQ(verdict(path_, {}), "passed") << name_of(dtype) << " " << c.text;
    }
  }
}

}  // namespace
}  // namespace foci::testing
