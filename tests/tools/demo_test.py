"""`crossdock demo pd` with a small trace: the figures of its JSON against what shape and trace make them, and its
picture element by element. Arguments: the built program, then those of unittest."""
# SPDX-License-Identifier: Apache-2.0
import html.parser
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

PROGRAM = sys.argv.pop(1)
PAGE_TOKENS = 16
# Tokens and prefix blocks of 512 of them: the third begins like the second, the last is longer than the pools.
TRACE = [(40, [1]), (600, [2, 3]), (600, [2, 4]), (1024, [5, 6]), (5, [7]), (1 << 20, list(range(10, 10 + 2048)))]
PLAYED = TRACE[:-1]
PAGES = sum(-(-tokens // PAGE_TOKENS) for tokens, _ in PLAYED)
SHARED = 512 // PAGE_TOKENS  # pages of the third that decode may have already
SHAPES = {"layers=6,heads=4,dim=128,dtype=2": 6 * 2 * 4 * 128 * 2, "layers=5,heads=1,dim=576,dtype=1,latent": 5 * 576}
LAYERS = {shape: int(re.match("layers=([0-9]+)", shape)[1]) for shape in SHAPES}


def demo(*arguments, folder, limit=90, **variables):
    trace = os.path.join(folder, "trace.jsonl")
    with open(trace, "w", encoding="ascii") as file:
        for tokens, hashes in TRACE:
            file.write(json.dumps({"timestamp": 0, "input_length": tokens, "hash_ids": hashes}) + "\n")
    command = [PROGRAM, "demo", "pd", *arguments]
    for option, value in (("--trace", trace), ("--memory", "64MiB"), ("--page-tokens", str(PAGE_TOKENS)),
                          ("--kv-shape", next(iter(SHAPES)))):
        if option not in arguments:
            command += [option, value]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False,
                          env={**os.environ, **variables})


class Balance(html.parser.HTMLParser):
    """Every element is closed by its own end tag, and nothing points out of the file."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.faults = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        self.faults += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")


def of_class(picture, kind):
    return [element for element in picture if element.get("class") == kind]


def title(element):
    return element.find("title").text


class Demo(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def demo(self, *arguments):
        return demo(*arguments, folder=self.folder.name)

    def play(self, transport, shape):
        picture = os.path.join(self.folder.name, "picture.html")
        done = self.demo("--transport", transport, "--kv-shape", shape, "--json", "--timeline", picture)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(picture, encoding="utf-8") as file:
            return json.loads(done.stdout), file.read()

    def drawn_in(self, page):
        """Mode to its picture."""
        parser = Balance()
        parser.feed(page)
        parser.close()
        self.assertEqual((parser.faults, parser.open), ([], []))
        found = re.findall(r"<h2>(\w+)</h2>.*?(<svg .*?</svg>)", page, re.S)
        return {mode: ET.fromstring(svg) for mode, svg in found}

    def check_run(self, run, token_bytes):
        page_bytes = PAGE_TOKENS * token_bytes
        self.assertEqual(run["problems"], [])
        self.assertEqual(run["requests_verified"], len(PLAYED))
        self.assertEqual(run["pages_verified"], PAGES)
        self.assertEqual(run["bytes_verified"], PAGES * page_bytes)
        self.assertIn(run["pages_shared"], (0, SHARED))
        self.assertEqual(run["bytes_received"], (PAGES - run["pages_shared"]) * page_bytes)
        for field in ("wall_s", "gb_per_s", "prefill_tokens_per_s"):
            self.assertGreater(run[field], 0, field)
        self.assertGreaterEqual(run["handoff_ms_p99"], run["handoff_ms_p50"])
        self.assertLess(run["handoff_ms_p99"], 1e3 * run["wall_s"] + 1)
        # Both factors are rounded to a thousandth.
        self.assertAlmostEqual(run["gb_per_s"] * run["wall_s"], run["bytes_received"] / 1e9,
                               delta=0.0006 * (run["gb_per_s"] + run["wall_s"]))

    def check_ratio(self, report):
        streamed, batch = (run["handoff_ms_p50"] for run in report["runs"])
        if streamed > 0:
            ratio = batch / streamed
            rounding = 0.006 + ratio * 0.0006 / streamed + 0.0006 / streamed
            self.assertAlmostEqual(report["handoff_p50_batch_over_streamed"], ratio, delta=rounding)

    def check_picture(self, mode, picture, layers):
        width = float(picture.get("viewBox").split()[2])
        height = float(picture.get("viewBox").split()[3])
        for rect in picture.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            self.assertTrue(0 < x and x + w <= width and 0 < y and y + h <= height, ET.tostring(rect))
        ticks = [tick.text for tick in of_class(picture, "tick")]
        self.assertEqual((len(ticks), len(set(ticks))), (11, 11), ticks)
        names = [name.text for name in of_class(picture, "name")]
        self.assertEqual(names, [f"{i + 1}: {tokens} tokens" for i, (tokens, _) in enumerate(PLAYED)])
        self.assertEqual(of_class(picture, "error"), [])
        first = [re.match(r"request (\d+): all KV at decode at ([\d.]+) ms", title(e)) for e in of_class(picture, "first")]
        self.assertEqual([int(m[1]) for m in first], list(range(1, len(PLAYED) + 1)))
        compute = [re.match(r"request (\d+): prefill ([\d.]+) to ([\d.]+) ms$", title(e))
                   for e in of_class(picture, "compute")]
        self.assertEqual([int(m[1]) for m in compute], list(range(1, len(PLAYED) + 1)))
        arrived = {}
        for rect in picture.iter("rect"):
            found = re.match(r"request (\d+), layer (\d+): computed ([\d.]+) ms, at decode ([\d.]+) ms$", title(rect))
            if found:
                arrived[int(found[1]), int(found[2])] = float(found[3]), float(found[4])
        self.assertEqual(set(arrived), {(r + 1, layer) for r in range(len(PLAYED)) for layer in range(layers)})
        for request, (computed, complete) in enumerate(zip(compute, first, strict=True), 1):
            begin, end, done = float(computed[2]), float(computed[3]), float(complete[2])
            self.assertLessEqual(begin, end)
            of_layers = [arrived[request, layer] for layer in range(layers)]
            for at, there in of_layers:
                self.assertTrue(begin - 0.01 <= at <= there + 0.01 and there <= done + 0.01, (begin, at, there, done))
                if mode == "batch":  # nothing leaves before all is computed
                    self.assertGreaterEqual(there, end - 0.01)

    def test_figures_and_picture(self):
        for transport in ("shm", "tcp"):
            for shape, token_bytes in SHAPES.items():
                with self.subTest(transport=transport, shape=shape):
                    report, page = self.play(transport, shape)
                    self.assertEqual(report["demo"], "pd")
                    self.assertEqual(report["transport"], transport)
                    self.assertEqual(report["token_bytes"], token_bytes)
                    self.assertEqual(report["requests"], len(PLAYED))
                    self.assertEqual(report["requests_skipped"], 1)
                    self.assertEqual(report["memory_bytes"], 64 << 20)
                    self.assertEqual([run["mode"] for run in report["runs"]], ["streamed", "batch"])
                    self.check_ratio(report)
                    self.assertEqual(len({run["prefill_tokens_per_s"] for run in report["runs"]}), 1)
                    for run in report["runs"]:
                        self.check_run(run, token_bytes)
                    drawn = self.drawn_in(page)
                    self.assertEqual(list(drawn), ["streamed", "batch"])
                    for mode, picture in drawn.items():
                        self.check_picture(mode, picture, LAYERS[shape])

    def test_one_mode(self):
        done = self.demo("--mode", "batch", "--json", "--requests", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual([run["mode"] for run in report["runs"]], ["batch"])
        self.assertNotIn("handoff_p50_batch_over_streamed", report)

    def test_each_worker_writes_a_trace(self):
        traces = os.path.join(self.folder.name, "trace-%p.json")
        for transport, modes in (("shm", "both"), ("tcp", "streamed")):
            done = demo("--transport", transport, "--mode", modes, "--json", folder=self.folder.name,
                        CROSSDOCK_TRACE=traces)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            written = [name for name in os.listdir(self.folder.name) if name.startswith("trace-")]
            self.assertEqual(len(written), 4 if modes == "both" else 2, done.stderr)
            for name in written:
                path = os.path.join(self.folder.name, name)
                with open(path, encoding="ascii") as file:
                    names = {event["name"] for event in json.load(file)["traceEvents"]}
                self.assertIn("transfer", names)
                os.remove(path)

    def test_a_fault_is_drawn(self):
        picture = os.path.join(self.folder.name, "picture.html")
        done = self.demo("--fault", "kill-prefill", "--timeline", picture)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(picture, encoding="utf-8") as file:
            drawn = self.drawn_in(file.read())
        self.assertEqual(list(drawn), ["streamed"])
        self.assertEqual(len(of_class(drawn["streamed"], "name")), len(PLAYED))
        self.assertEqual({error.text for error in of_class(drawn["streamed"], "error")}, {"failed"})

    def test_mistakes_end_soon_with_a_sentence(self):
        for code, words, *arguments in (
                (2, "layers = 0 must be", "--kv-shape", "layers=0,heads=1,dim=1,dtype=2"),
                (2, "--page-tokens 7 must divide 512", "--page-tokens", "7"),
                (2, "--requests 0 must be", "--requests", "0"),
                (2, "{streamed,batch,both}", "--mode", "sideways"),
                (2, "--page-tokens 0 must divide 512", "--page-tokens", "0"),
                (2, "known are qwen3-30b-a3b", "--kv-shape", "no-such"),
                (2, "dim is missing", "--kv-shape", "layers=4,heads=8"),
                (2, "not in range 1 to", "--tokens", "0"),
                (2, "--trace excludes --tokens", "--tokens", "512"),
                (2, "--prefill-tokens-per-s", "--prefill-tokens-per-s", "-1"),
                (2, "--json", "--json", "--fault", "kill-decode"),
                (1, "a pool of 225 bytes", "--memory", "512"),
                (1, "raise --memory", "--memory", "1KiB"),
                (2, "'pigeon', which is no transport", "--transport", "pigeon"),
                (1, "/none/picture.html", "--timeline", "/none/picture.html"),
                # Its two engines do not reach each other.
                (1, "loopback reaches only the engine itself", "--transport", "loopback")):
            with self.subTest(arguments=arguments):
                done = demo(*arguments, folder=self.folder.name, limit=40)
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                self.assertIn(words, done.stdout + done.stderr)
                self.assertNotIn("did not start", done.stderr)

    def test_a_wrong_variable_is_the_caller_s_mistake(self):
        done = demo(folder=self.folder.name, limit=40, CROSSDOCK_LOG="loud")
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("loud", done.stderr)
        self.assertNotIn("peer lost", done.stderr)


if __name__ == "__main__":
    unittest.main()
