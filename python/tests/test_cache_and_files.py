"""foci.Cache, safetensors and case files."""

from pathlib import Path

import numpy as np
import pytest
from formulas import attention, causal, near

import foci

CONFORMANCE = Path(__file__).resolve().parents[3] / "shared" / "conformance"


def tokens(n, h=4, hk=2, d=8, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda heads: rng.standard_normal((1, heads, n, d)).astype(dtype)
    return draw(h), draw(hk), draw(hk)


def test_a_cache_gives_the_bits_of_one_call():
    q, k, v = tokens(20)
    want = foci.attention(q, k, v, causal=True)
    near(want, attention(q, k, v, allowed=causal(20, 20)))
    cache = foci.Cache(kv_heads=2, head_size=8)
    got = []
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        got.append(cache.attend(q[:, :, begin:end], causal=True))
    assert (np.concatenate(got, 2) == want).all()
    assert cache.position() == cache.length() == 20 and cache.first() == 0
    assert (cache.keys() == k[0]).all() and (cache.values() == v[0]).all()
    cache.truncate(0, 7)
    cache.append(k[:, :, 7:8], v[:, :, 7:8])
    assert (cache.attend(q[:, :, 7:8], causal=True) == want[:, :, 7:8]).all()
    out = cache.attend(q[:, :, 7:8], causal=True, statistics=["entropy", "coverage"])
    assert out.entropy.shape == (1, 4, 1) and out.coverage.shape == (1, 4, 8)
    cache.reset(0)
    assert cache.length() == 0


def test_a_rolling_cache_forgets():
    q, k, v = tokens(30, dtype=np.float16)
    cache = foci.Cache(kv_heads=2, head_size=8, dtype="float16", window=4)
    for n in range(30):
        cache.append(k[:, :, n:n + 1], v[:, :, n:n + 1])
        y = cache.attend(q[:, :, n:n + 1])
    assert cache.position() == 30 and cache.length() < 30
    near(y, attention(q[:, :, -1:], k[:, :, -4:], v[:, :, -4:]), 2e-3)


def test_a_cache_says_what_does_not_fit():
    cache = foci.Cache(kv_heads=2, head_size=8)
    q, k, v = tokens(3)
    with pytest.raises(ValueError, match="k: "):
        cache.append(k[..., :4], v)
    with pytest.raises(ValueError, match="q: None"):
        cache.attend(None)
    with pytest.raises(ValueError, match="keep: a cache reads no array"):
        cache.attend(q, keep=np.ones((3, 3), bool))
    with pytest.raises(TypeError, match="kv_heads: float arrived"):
        foci.Cache(kv_heads=2.0, head_size=8)
    with pytest.raises(ValueError, match="sequence"):
        cache.position(1)


def test_arrays_survive_a_file(tmp_path):
    arrays = {"half": np.arange(6, dtype=np.float16).reshape(2, 3),
              "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
              "flag": np.array([True, False]), "whole": np.array(2**40),
              "none": np.zeros((0, 3), "f4")}
    path = tmp_path / "x.safetensors"
    foci.save(path, arrays, {"maker": "a test"})
    back = foci.load(path)
    assert sorted(back) == sorted(arrays)
    for name, x in arrays.items():
        assert back[name].dtype == x.dtype and back[name].shape == x.shape
        assert (back[name] == x).all()
    assert foci.load_metadata(path) == {"maker": "a test"}


def test_files_that_lie(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(OSError):
        foci.load(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="x.safetensors"):
        foci.load(path)
    with pytest.raises(TypeError, match=r"tensors\['a'\]: list arrived"):
        foci.save(path, {"a": [1, 2]})
    assert path.read_bytes() == b"\xff" * 64
    with pytest.raises(TypeError, match="metadata"):
        foci.save(path, {}, {"a": 1})
    with pytest.raises(TypeError, match="path: int arrived"):
        foci.load(3)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
                                  "uint64", "bool", "float16", "float32", "float64"])
def test_every_type_of_numpy_survives_a_file(tmp_path, kind):
    x = np.array([[0, 1, 1], [1, 0, 1]], kind)
    if x.dtype.kind in "iu":
        x[0] = np.iinfo(kind).min, np.iinfo(kind).max, 7
    foci.save(tmp_path / "x.safetensors", {"x": x, "turned": x.T, "w": np.ones(3, "f4")})
    back = foci.load(tmp_path / "x.safetensors")
    assert back["x"].dtype == x.dtype and (back["x"] == x).all() and (back["turned"] == x.T).all()
    assert (back["w"] == 1).all() and back.unreadable == {}


def test_what_numpy_lacks_stops_only_who_asks_for_it(tmp_path):
    path = tmp_path / "x.safetensors"
    header = (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
              b'"e4":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[8,12]},'
              b'"ids":{"dtype":"U16","shape":[1],"data_offsets":[12,14]},'
              b'"b":{"dtype":"BF16","shape":[1],"data_offsets":[14,16]}}')
    data = np.array([1.5, -2], "f4").tobytes() + b"abcd" + b"\x03\x01" + b"\x80\x3f"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    got = foci.load(path)
    assert sorted(got) == ["b", "ids", "w"] and got["ids"][0] == 259 and got["b"][0] == 1
    assert (got["w"] == [1.5, -2]).all() and "e4" not in got
    assert list(got.unreadable) == ["e4"] and "F8_E4M3" in got.unreadable["e4"]
    with pytest.raises(ValueError, match=r"x\.safetensors: tensor 'e4': dtype \"F8_E4M3\""):
        got["e4"]
    with pytest.raises(KeyError, match="nothing"):
        got["nothing"]


@pytest.mark.parametrize("data, words", [
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "looks like a PNG picture"),
    (b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", "looks like a checkpoint of PyTorch"),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "looks like a pickle"),
    (b"\x93NUMPY\x01\0v\0{'descr': '<f4'", "looks like a NumPy array"),
    (b"<!DOCTYPE html><html>", "looks like an HTML page"),
    (b"", "the file is empty"), (b"\x10\0\0", "3 bytes are too few"),
    (b"\x40\0\0\0\0\0\0\0{}", "only 2 bytes follow")])
def test_other_files_are_named_for_what_they_are(tmp_path, data, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        foci.load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_the_system_refuses_is_an_os_error(tmp_path):
    model, page = tmp_path / "model", tmp_path / "page.html"
    for call in (lambda: foci.load(tmp_path / "nowhere"), lambda: foci.load(tmp_path),
                 lambda: foci.load_metadata(tmp_path / "nowhere"),
                 lambda: foci.save(tmp_path / "no" / "where", {"x": np.ones(1)}),
                 lambda: foci.save(tmp_path, {"x": np.ones(1)}),
                 lambda: foci.inspect(model, tmp_path / "a.png"),
                 lambda: foci.inspect(model, "a.png", report=tmp_path)):
        with pytest.raises(OSError):
            call()
    assert not page.exists() and list(tmp_path.iterdir()) == []
    model.mkdir()
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="inside one another"):
        foci.inspect(model, tmp_path / "a.png")
    with pytest.raises(ValueError, match="null character"):
        foci.load("a\0b")
    name = b"\xff.safetensors"  # no text, but a name that files may have
    foci.save(bytes(tmp_path) + b"/" + name, {"x": np.ones(2)})
    assert (foci.load(bytes(tmp_path) + b"/" + name)["x"] == 1).all()
    with pytest.raises(OSError, match="cannot be opened"):
        foci.load(b"nowhere\xff")


def test_a_spec_without_end_is_one_line():
    for text in ("[" * 10_000_000, '{"scale":' + "[" * 200_000, '{"a":' * 200_000,
                 '{"scale":[' + "1," * 200_000 + "1]}"):
        with pytest.raises(ValueError) as caught:
            foci.Spec.from_json(text)
        assert len(str(caught.value)) < 200


def test_case_files_run_on_the_engine(tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 5, 4)).astype(np.float32) for _ in range(3))
    case = {"in.q": q, "in.k": k, "in.v": v, "out.y": attention(q, k, v)}
    foci.save(tmp_path / "right.safetensors", case, {"op": "foci.attention", "attributes": "{}"})
    report = foci.verify(tmp_path)
    assert (report["passed"], report["failed"]) == (1, 0)
    case["out.y"] = case["out.y"] + 1e-3
    foci.save(tmp_path / "wrong.safetensors", case, {"op": "foci.attention", "attributes": "{}"})
    report = foci.verify([tmp_path / "wrong.safetensors"], implementation="fused")
    assert report["failed"] == 1 and report["failures"][0]["tensor"] == "y"
    with pytest.raises(ValueError, match="implementation"):
        foci.verify(tmp_path, implementation="best")


@pytest.mark.skipif(not CONFORMANCE.is_dir(), reason="no conformance cases beside the clone")
def test_conformance_cases_pass():
    report = foci.verify(CONFORMANCE / "onnx")
    assert report["failed"] == 0 and report["passed"] > 0


def test_threads_use_a_cache_one_at_a_time():
    import threading

    cache = foci.Cache(kv_heads=2, head_size=16)
    token = np.ones((1, 2, 1, 16), np.float32)
    cache.append(token, token)
    bad = []

    def append():
        for _ in range(300):
            cache.append(token, token)

    def attend():
        for _ in range(300):
            y = cache.attend(token)
            if not np.allclose(y, 1):
                bad.append(y)

    threads = [threading.Thread(target=f) for f in (append, append, attend, attend)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad and cache.length() == 601
