// The vision transformer: packed against one by one, gradients, what look() reads, its folder.
#include "foci/models/vit/vit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <filesystem>

#include "autograd/gradient_check.h"
#include "foci/autograd/profile.h"
#include "foci/io/file.h"
#include "foci/io/safetensors.h"
#include "foci/nn/checkpoint.h"
#include "io/damage.h"

namespace foci {
namespace {

using testing::expect_error;
using testing::expect_slope;
using testing::random_tensor;

VitConfig small(Pooling pooling) {
  VitConfig c;
  c.patch = 2;
  c.classes = {"a", "b", "c"};
  c.width = 12;
  c.layers = 2;
  c.heads = 3;
  c.feed_forward = 20;
  c.pooling = pooling;
  c.position_rows = 3;
  c.position_cols = 4;
  return c;
}

constexpr Pooling kPoolings[] = {Pooling::mean, Pooling::class_token, Pooling::attention};
const std::vector<PatchGrid> kGrids = {{3, 4}, {1, 1}, {5, 2}, {4, 4}};
constexpr int64_t kPatches = 12 + 1 + 10 + 16;

class Folder : public ::testing::Test {
 protected:
  testing::TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
};

TEST(VitTest, PackedEqualsOneByOneBitForBit) {
  const Tensor patches = random_tensor({kPatches, 4}, 1).to(DType::f32);
  for (Pooling pooling : kPoolings) {
    Vit<float> model(small(pooling));
    model.reset(3);
    const auto packed = model.look(patches, kGrids);
    ASSERT_EQ(packed.logits.shape(), (Dims{4, 3}));
    for (size_t p = 0, at = 0; p < kGrids.size(); ++p) {
      const auto n = static_cast<size_t>(kGrids[p].first * kGrids[p].second);
      const auto alone = model.look(
          patches.slice(0, static_cast<int64_t>(at), static_cast<int64_t>(at + n)), {kGrids[p]});
      for (int64_t c = 0; c < 3; ++c) {
        EXPECT_EQ(alone.logits.at<float>(0, c), packed.logits.at<float>(p, c))
            << name_of(pooling) << " picture " << p;
      }
      for (int64_t i = 0; i < alone.pictures[0].maps.numel(); ++i) {
        EXPECT_EQ(alone.pictures[0].maps.span<float>()[i], packed.pictures[p].maps.span<float>()[i])
            << name_of(pooling) << " picture " << p;
      }
      at += n;
    }
  }
}

TEST(VitTest, FloatFollowsDouble) {
  const Tensor patches = random_tensor({kPatches, 4}, 1);
  for (Pooling pooling : kPoolings) {
    Vit<double> exact(small(pooling));
    exact.reset(3);
    Vit<float> single(small(pooling));
    nn::copy_parameters(exact, single);
    EXPECT_LT(testing::difference(single.look(patches, kGrids).logits,
                                  exact.look(patches, kGrids).logits),
              2e-5);
  }
}

// Along one random direction through all parameters at once.
TEST(VitTest, GradientsByFiniteDifferences) {
  const Tensor patches = random_tensor({kPatches, 4}, 1);
  for (Pooling pooling : kPoolings) {
    Vit<double> model(small(pooling));
    model.reset(3);
    const auto loss_of = [&](Tape<double>& tape) {
      nn::Context<double> context{tape};
      return ops::softmax_cross_entropy(
          tape, model.forward(context, tape.constant(patches), kGrids), {0, 2, 1, 1}, 0.1);
    };
    Tape<double> tape;
    tape.backward(loss_of(tape));
    // The class token is small before the first norm, which is stiff there: hence the small step.
    ASSERT_NO_FATAL_FAILURE(
        expect_slope(model.parameters(), loss_of, 1, std::string(name_of(pooling))));
  }
}

// Pictures of mixed sizes cost what they cost one by one, forward and backward: nothing is padded.
TEST(VitTest, PackedTrainingWastesNothing) {
  const Tensor patches = random_tensor({kPatches, 4}, 1).to(DType::f32);
  for (Pooling pooling : kPoolings) {
    Vit<float> model(small(pooling));
    model.reset(3);
    const auto flops_of = [&](const Tensor& some, const std::vector<PatchGrid>& grids) {
      Profile profile;
      const Profiling on(profile);
      Tape<float> tape;
      nn::Context<float> context{tape};
      const Var<float> loss =
          ops::softmax_cross_entropy(tape, model.forward(context, tape.constant(some), grids),
                                     std::vector<int64_t>(grids.size(), 1), 0);
      tape.backward(loss);
      double flops = 0;
      for (const Profile::Row& row : profile.rows()) flops += row.flops;
      return flops;
    };
    double alone = 0;
    int64_t at = 0;
    for (const PatchGrid& grid : kGrids) {
      const int64_t n = grid.first * grid.second;
      alone += flops_of(patches.slice(0, at, at + n), {grid});
      at += n;
    }
    EXPECT_EQ(flops_of(patches, kGrids), alone) << name_of(pooling);
  }
}

TEST(VitTest, LookReadsTheWeightsOfTheQueryThatPools) {
  const Tensor patches = random_tensor({kPatches, 4}, 1);
  for (Pooling pooling : kPoolings) {
    Vit<double> model(small(pooling));
    model.reset(3);
    const auto look = model.look(patches, kGrids);
    ASSERT_EQ(look.pictures.size(), kGrids.size());
    const int64_t extra = pooling == Pooling::class_token;
    for (size_t p = 0, at = 0; p < kGrids.size(); ++p) {
      const int64_t P = kGrids[p].first * kGrids[p].second;
      const Tensor own = patches.slice(0, static_cast<int64_t>(at), static_cast<int64_t>(at) + P);
      at += static_cast<size_t>(P);
      const PictureAttention& seen = look.pictures[p];
      ASSERT_EQ(seen.maps.shape(), (Dims{model.map_layers(), 3, P}));
      // From exact rows: the class token's, or the mean over all.
      std::vector<Tensor> rows;
      for (int64_t i = 0; i < P + extra; ++i) rows.push_back(model.weights(own, kGrids[p], i));
      for (int64_t l = 0; l < 2; ++l) {
        for (int64_t h = 0; h < 3; ++h) {
          double entropy = 0;
          for (const Tensor& row : rows) {
            for (int64_t j = 0; j < P + extra; ++j) {
              const double w = row.item({l, h, j});
              if (w > 0) entropy -= w * std::log(w) / static_cast<double>(rows.size());
            }
          }
          EXPECT_NEAR(seen.entropy.at<float>(l, h), entropy, 1e-6);
          for (int64_t j = 0; j < P; ++j) {
            double want = 0;
            for (const Tensor& row : rows) want += row.item({l, h, j + extra}) / double(P);
            if (extra) want = rows[0].item({l, h, j + 1});
            EXPECT_NEAR(seen.maps.at<float>(l, h, j), want, 1e-6);
          }
        }
      }
      if (pooling == Pooling::attention) {
        for (int64_t h = 0; h < 3; ++h) {
          double sum = 0;
          for (int64_t j = 0; j < P; ++j) sum += seen.maps.at<float>(2, h, j);
          EXPECT_NEAR(sum, 1, 1e-6);
        }
      }
    }
  }
}

TEST(VitTest, RefusesPatchesThatDoNotFitTheGrids) {
  Vit<float> model(small(Pooling::mean));
  expect_error<ArgumentError>(
      [&] {
        model.look(Tensor::zeros({5, 4}), {{2, 3}});
      },
      {"5 patches", "the grids hold 6"});
  expect_error<ArgumentError>(
      [&] {
        model.look(Tensor::zeros({6, 5}), {{2, 3}});
      },
      {"[6, 5]", "[patches, 4]"});
  expect_error<ArgumentError>([&] { model.look(Tensor::zeros({0, 4}), {{0, 3}}); }, {"grid"});
  constexpr int64_t kHuge = int64_t{1} << 40;
  expect_error<ArgumentError>(
      [&] {
        model.look(Tensor::zeros({6, 4}), {{kHuge, kHuge}});
      },
      {"a grid of 1099511627776"});
  expect_error<ArgumentError>([&] { model.look(Tensor(), {{2, 3}}); }, {"no patches"});
  expect_error<ArgumentError>([&] { model.look(Tensor::zeros({0, 4}), {}); }, {"no pictures"});
  expect_error<ArgumentError>([&] { model.weights(Tensor(), {2, 3}, 0); }, {"shape none"});
  VitConfig c = small(Pooling::mean);
  c.patch = kHuge;
  expect_error<ArgumentError>([&] { Vit<float>{c}; }, {"vit patch"});
  c = small(Pooling::mean);
  c.eps = std::numeric_limits<double>::infinity();
  expect_error<ArgumentError>([&] { Vit<float>{c}; }, {"vit eps"});
}

TEST(VitConfigTest, JsonRoundTrip) {
  VitConfig c = small(Pooling::attention);
  c.dropout = 0.1;
  c.classes = {"ein \"Wort\"", "ü", "3"};
  c.attention.normalizer = Sparsemax{};
  EXPECT_EQ(vit_config_from_json(vit_config_to_json(c), "c"), c);
}

TEST(VitConfigTest, NamesWhatIsWrong) {
  const std::string good = vit_config_to_json(small(Pooling::mean));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string s = good;
    const size_t at = s.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return s.replace(at, from.size(), to);
  };
  const auto read = [](const std::string& text) {
    return [text] { vit_config_from_json(text, "x/config.json"); };
  };
  expect_error<FormatError>(read("{"), {"x/config.json", "not JSON"});
  expect_error<FormatError>(read("[]"), {"object"});
  expect_error<FormatError>(read(std::string(60'000'000, '[')), {"x/config.json", "bytes of JSON"});
  expect_error<FormatError>(read(std::string(1'000'000, '[')), {"inside one another"});
  expect_error<FormatError>(read(with("\"foci-vit\"", "\"foci-vit\", \"model_type\": \"x\"")),
                            {"model_type stands twice"});
  expect_error<FormatError>(read(with("\"hidden_size\": 12", "\"hidden_size\": [[1], {\"a\": 2}]")),
                            {"hidden_size holds an array"});
  expect_error<FormatError>(read(with("\"patch_size\"", "\"patch\"")), {"patch_size is missing"});
  expect_error<FormatError>(read(with("\"hidden_size\": 12", "\"hidden_size\": \"12\"")),
                            {"hidden_size holds \"12\""});
  expect_error<FormatError>(read(with("\"hidden_size\": 12", "\"hidden_size\": 13")),
                            {"x/config.json", "heads: 3"});
  expect_error<FormatError>(read(with("\"hidden_size\": 12", "\"hidden_size\": 9999999999999")),
                            {"width"});
  expect_error<FormatError>(read(with("\"mean\"", "\"median\"")), {"pooling holds \"median\""});
  expect_error<FormatError>(read(with("\"masks\": []", "\"masks\": [{\"kind\": \"keep\"}]")),
                            {"x/config.json", "the mask keep"});
  expect_error<FormatError>(read(with("\"kind\": \"dot\"", "\"kind\": \"additive\"")),
                            {"the score additive"});
  expect_error<FormatError>(read(with("\"scale\": \"auto\"", "\"scale\": [1, 2]")),
                            {"2 numbers for 3 heads"});
  expect_error<FormatError>(read(with("foci-vit", "bert")), {"model_type is \"bert\""});
  expect_error<FormatError>(read(with("\"1\": \"b\"", "\"7\": \"b\"")), {"id2label"});
}

TEST_F(Folder, RoundTrip) {
  Vit<float> model(small(Pooling::class_token));
  model.reset(8);
  save_vit(folder_ / "deep" / "er", model);
  const auto loaded = load_vit(folder_ / "deep" / "er");
  EXPECT_EQ(loaded->config(), model.config());
  const auto a = model.parameters(), b = loaded->parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i]->name, b[i]->name);
    EXPECT_EQ(testing::difference(a[i]->value, b[i]->value), 0) << a[i]->name;
  }
}

TEST_F(Folder, ErrorsNameWhatIsMissing) {
  expect_error<IoError>([&] { load_vit(folder_ / "nowhere"); },
                        {"nowhere", "no such model folder"});
  expect_error<IoError>([&] { load_vit(folder_); }, {"no config.json"});
  Vit<float> model(small(Pooling::mean));
  save_vit(folder_, model);
  std::filesystem::remove(folder_ / "model.safetensors");
  expect_error<IoError>([&] { load_vit(folder_); }, {"model.safetensors"});
}

TEST_F(Folder, ACheckpointOfAnotherShapeNamesTensorAndShapes) {
  Vit<float> model(small(Pooling::mean));
  model.reset(1);
  save_vit(folder_, model);
  VitConfig wide = small(Pooling::mean);
  wide.feed_forward = 24;
  Vit<float> other(wide);
  other.reset(2);
  const Tensor before = other.parameters()[0]->value.clone();
  expect_error<FormatError>([&] { nn::load_parameters(folder_ / "model.safetensors", other); },
                            {"encoder.layer.0.intermediate.weight", "[20, 12]", "[24, 12]"});
  EXPECT_EQ(testing::difference(other.parameters()[0]->value, before), 0);  // nothing half loaded
  VitConfig deep = small(Pooling::mean);
  deep.layers = 3;
  Vit<float> more(deep);
  expect_error<FormatError>([&] { nn::load_parameters(folder_ / "model.safetensors", more); },
                            {"encoder.layer.2.", "missing"});
  deep.layers = 1;
  Vit<float> fewer(deep);
  expect_error<FormatError>([&] { nn::load_parameters(folder_ / "model.safetensors", fewer); },
                            {"encoder.layer.1.", "no place"});
}

// Memory for such models is never asked for: none of them could be had.
TEST_F(Folder, AConfigOfAbsurdSizesIsComparedWithTheWeightsFirst) {
  Vit<float> model(small(Pooling::attention));
  model.reset(1);
  save_vit(folder_, model);
  const std::string good = read_file(folder_ / "config.json");
  const auto load_with = [&](const std::string& from, const std::string& to) {
    std::string s = good;
    const size_t at = s.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write_file(folder_ / "config.json", s.replace(at, from.size(), to));
    load_vit(folder_);
  };
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::vector<std::string>& parts) {
    SCOPED_TRACE(to);
    expect_error<FormatError>([&] { load_with(from, to); }, parts);
  };
  refused("\"hidden_size\": 12", "\"hidden_size\": 1048575",
          {"pooler.probe", "[1, 12]", "[1, 1048575]"});
  refused("\"intermediate_size\": 20", "\"intermediate_size\": 1048576",
          {"encoder.layer.0.intermediate.weight", "[20, 12]", "[1048576, 12]"});
  refused("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4096",
          {"encoder.layer.2.", "missing"});
  const std::string grid = "\"position_grid\": [\n    3,\n    4\n  ]";
  refused(grid, "\"position_grid\": [1048576, 1048576]",
          {"embeddings.weight", "[12, 12]", "[1099511627776, 12]"});
  refused(grid, "\"position_grid\": [18446744073709551615, 4]", {"position_rows"});
  refused(grid, "\"position_grid\": [3, -4]", {"position_cols: -4"});
  refused("\"patch_size\": 2", "\"patch_size\": 1024", {"[12, 4]", "[12, 1048576]"});
  refused("\"num_channels\": 1", "\"num_channels\": -1", {"channels: -1"});
  refused("\"hidden_size\": 12", "\"hidden_size\": -12", {"width: -12"});
  refused("\"hidden_size\": 12", "\"hidden_size\": 18446744073709551615", {"width"});
  refused("\"hidden_size\": 12", "\"hidden_size\": 99999999999999999999999",
          {"hidden_size", "whole number"});
  refused("\"num_hidden_layers\": 2", "\"num_hidden_layers\": -2", {"layers: -2"});
  refused("\"num_attention_heads\": 3", "\"num_attention_heads\": 0", {"heads: 0"});
}

TEST_F(Folder, AFileThatIsNoTrainingStateIsRefused) {
  Vit<float> model(small(Pooling::mean));
  save_vit(folder_, model);
  nn::FlatParameters flat(model.parameters());
  nn::AdamW optimiser(flat, {});
  expect_error<FormatError>(
      [&] { nn::load_training(folder_ / "model.safetensors", flat, optimiser); },
      {"model.safetensors"});
  nn::save_training(folder_ / "t.safetensors", flat, optimiser, {{"step", "4"}});
  EXPECT_EQ(nn::load_training(folder_ / "t.safetensors", flat, optimiser).at("step"), "4");
}

}  // namespace
}  // namespace foci
