// SPDX-License-Identifier: Apache-2.0
#include "base/config.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <string>

#include "support/temp_dir.hpp"

namespace crossdock::base {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

// load() with exactly these variables, so that the tests do not depend on the caller's environment.
Result<Config> load(const std::vector<std::string>& variables, const ConfigOverrides& code = {},
                    const std::string& file = {}) {
  std::vector<const char*> environment;
  for (const auto& one : variables)
    environment.push_back(one.c_str());
  environment.push_back(nullptr);
  return Config::load(code, {.environment = environment.data(), .file = file});
}

TEST(ConfigTable, IsSortedCompleteAndValid) {
  std::set<std::string> variables;
  std::string_view last;
  for (const Setting& setting : settings()) {
    EXPECT_LT(last, setting.name) << "rows are sorted and unique";
    last = setting.name;
    EXPECT_TRUE(variables.insert(environment_name(setting)).second) << setting.name;
    if (!setting.alias.empty()) {
      EXPECT_TRUE(variables.insert(std::string(setting.alias)).second);
    }
    EXPECT_THAT(std::string(setting.help), testing::EndsWith(".")) << setting.name;
    // A default that does not parse or is outside its own range aborts in defaults().
    const bool needs_choices = setting.type == SettingType::kEnum;
    EXPECT_FALSE(needs_choices && setting.allowed.empty()) << setting.name;
  }
  EXPECT_TRUE(load({}).ok());
}

TEST(Config, DefaultsAreTyped) {
  const Config config = Config::defaults();
  EXPECT_EQ(config.size("transfer.slice_bytes"), 65536u);
  EXPECT_EQ(config.duration("transfer.timeout"), 10min);
  EXPECT_TRUE(config.boolean("transfer.merge"));
  EXPECT_EQ(config.integer("transfer.max_retries"), 2);
  EXPECT_EQ(config.string("transport.shm.copy"), "auto");
  EXPECT_EQ(config.origin("transfer.merge").describe(), "default");
  EXPECT_EQ(config.text("transfer.slice_bytes"), "64KiB");
  EXPECT_EQ(config.text("transfer.timeout"), "10min");
}

TEST(Config, LaterSourcesWin) {
  const support::TempDir dir;
  const auto file = dir.write("c.toml",
                              "[transfer]\nslice_bytes = \"8KiB\"\ntimeout = '7s'\n"
                              "max_retries = 5\nmerge = false\n[transport]\n"
                              "enabled = ['shm', 'tcp']\n[transport.tcp]\nlanes = 3\n");
  const auto loaded = load({"CROSSDOCK_TRANSFER_TIMEOUT=8s", "CROSSDOCK_TRANSPORT_TCP_LANES=4"},
                           {{"transport.tcp.lanes", "5"}}, file);
  ASSERT_TRUE(loaded.ok()) << loaded.error().describe();
  EXPECT_EQ(loaded->size("transfer.slice_bytes"), 8192u);
  EXPECT_EQ(loaded->origin("transfer.slice_bytes").describe(), "file " + file + ":2");
  EXPECT_EQ(loaded->integer("transfer.max_retries"), 5);
  EXPECT_FALSE(loaded->boolean("transfer.merge"));
  EXPECT_THAT(loaded->list("transport.enabled"), ElementsAre("shm", "tcp"));
  EXPECT_EQ(loaded->duration("transfer.timeout"), 8s);
  EXPECT_EQ(loaded->origin("transfer.timeout").describe(),
            "environment CROSSDOCK_TRANSFER_TIMEOUT");
  EXPECT_EQ(loaded->integer("transport.tcp.lanes"), 5);
  EXPECT_EQ(loaded->origin("transport.tcp.lanes").describe(), "code");
}

TEST(Config, TheEnvironmentNamesTheFile) {
  const support::TempDir dir;
  const auto file = dir.write("c.toml", "log.level = 'debug'\n");
  const auto loaded = load({"CROSSDOCK_CONFIG=" + file});
  ASSERT_TRUE(loaded.ok()) << loaded.error().describe();
  EXPECT_EQ(loaded->string("log.level"), "debug");
  EXPECT_THAT(loaded->warnings(), IsEmpty());
}

TEST(Config, AliasesWork) {
  const auto loaded = load({"CROSSDOCK_TRACE=/tmp/t.json", "CROSSDOCK_LOG=warn"});
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->string("trace.file"), "/tmp/t.json");
  EXPECT_EQ(loaded->origin("log.level").describe(), "environment CROSSDOCK_LOG");
}

TEST(Config, UnknownVariablesWarnWithASuggestion) {
  const auto loaded = load({"CROSSDOCK_TRANSFER_SLICE_BYTE=1", "CROSSDOCK_WHATEVER_ELSE=2",
                            "UNRELATED=3", "CROSSDOCK_NO_EQUALS"});
  ASSERT_TRUE(loaded.ok());
  EXPECT_THAT(loaded->warnings(),
              ElementsAre("environment variable CROSSDOCK_TRANSFER_SLICE_BYTE is no setting and is "
                          "ignored (did you mean 'CROSSDOCK_TRANSFER_SLICE_BYTES'?)",
                          "environment variable CROSSDOCK_WHATEVER_ELSE is no setting and is "
                          "ignored"));
}

TEST(Config, UnknownNamesInCodeAreRefused) {
  const auto loaded = load({}, {{"transfer.slicebytes", "1MiB"}});
  ASSERT_EQ(loaded.code(), Code::kInvalidArgument);
  EXPECT_THAT(loaded.error().message, StartsWith("there is no setting 'transfer.slicebytes'"));
  EXPECT_THAT(loaded.error().message, HasSubstr("did you mean 'transfer.slice_bytes'?"));
}

TEST(Config, UnknownNamesInAFileAreRefusedWithTheirLine) {
  const support::TempDir dir;
  const auto file = dir.write("c.toml", "\n[transfer]\nchecksun = true\n");
  const auto loaded = load({}, {}, file);
  ASSERT_EQ(loaded.code(), Code::kInvalidArgument);
  EXPECT_THAT(loaded.error().message, HasSubstr(file + ":3"));
  EXPECT_THAT(loaded.error().message, HasSubstr("did you mean 'transfer.checksum'?"));
}

struct BadValue {
  const char* name;
  const char* value;
  const char* says;
};
class ConfigRefuses : public testing::TestWithParam<BadValue> {};

TEST_P(ConfigRefuses, WithNameSourceAndRule) {
  const auto loaded = load({}, {{GetParam().name, GetParam().value}});
  ASSERT_EQ(loaded.code(), Code::kInvalidArgument);
  EXPECT_THAT(loaded.error().message, HasSubstr(std::string("setting ") + GetParam().name));
  EXPECT_THAT(loaded.error().message, HasSubstr("from code"));
  EXPECT_THAT(loaded.error().message, HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Values, ConfigRefuses,
    testing::Values(BadValue{"transfer.slice_bytes", "1KiB", "1KiB is outside 4KiB to 1GiB"},
                    BadValue{"transfer.slice_bytes", "lots", "as in 64KiB"},
                    BadValue{"transfer.timeout", "30", "as in 250ms"},
                    BadValue{"transfer.timeout", "0", "outside 1ms to 24h"},
                    BadValue{"transfer.max_retries", "-1", "outside 0 to 100"},
                    BadValue{"transfer.max_retries", "two", "no whole number"},
                    BadValue{"transfer.merge", "maybe", "neither true nor false"},
                    BadValue{"transport.shm.copy", "mapp",
                             "none of auto, map, vm (did you mean "
                             "'map'?)"}));

TEST(Config, WrongValuesInTheEnvironmentAreRefused) {
  const auto loaded = load({"CROSSDOCK_TRANSFER_MERGE=perhaps"});
  ASSERT_EQ(loaded.code(), Code::kInvalidArgument);
  EXPECT_THAT(loaded.error().message, HasSubstr("environment CROSSDOCK_TRANSFER_MERGE"));
}

TEST(Config, BrokenFilesAreNamedWithTheirLine) {
  const support::TempDir dir;
  const auto broken = dir.write("broken.toml", "a = 1\nb = = 2\n");
  EXPECT_THAT(load({}, {}, broken).error().message, HasSubstr(broken + ":2"));
  const auto number = dir.write("number.toml", "[transfer]\ntimeout = 1.5\n");
  EXPECT_THAT(load({}, {}, number).error().message,
              HasSubstr(number + ":2: setting transfer.timeout"));
  const auto missing = load({}, {}, dir.path() + "/none.toml");
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("none.toml"));
  EXPECT_FALSE(load({}, {}, dir.path()).ok()) << "a folder is no file";
}

TEST(Config, SecretsAreNotPrinted) {
  const auto loaded = load({"CROSSDOCK_CONTROL_SECRET=hunter2"});
  EXPECT_EQ(loaded->string("control.secret"), "hunter2");
  EXPECT_EQ(loaded->text("control.secret"), "(set)");
  EXPECT_EQ(Config::defaults().text("control.secret"), "");
}

TEST(ConfigDeathTest, AskingForWhatIsNotInTheTableIsABug) {
  const Config config = Config::defaults();
  EXPECT_DEATH((void)config.size("transfer.no_such"), "bug: transfer.no_such");
  EXPECT_DEATH((void)config.integer("transfer.slice_bytes"), "bug: transfer.slice_bytes");
}

}  // namespace
}  // namespace crossdock::base
