//! What a client sends to the plugin's sockets, through the adaptor for old kubelets.

use tessera_rpc::authority::Rewriter;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How the bytes are cut makes no difference, the output stays in proportion, and it is what a
/// second adaptor would leave alone.
pub fn http2(data: &[u8]) {
    check(data);
    check(&[PREFACE, data].concat());
}

fn check(input: &[u8]) {
    let mut whole = Vec::new();
    let end = Rewriter::default().feed(input, &mut whole);

    let mut cut = Vec::new();
    let mut rewriter = Rewriter::default();
    let mut pieces = (1..8).cycle();
    let mut rest = input;
    let mut cut_end = Ok(());
    while !rest.is_empty() && cut_end.is_ok() {
        let (now, later) = rest.split_at(pieces.next().unwrap_or(1).min(rest.len()));
        cut_end = rewriter.feed(now, &mut cut);
        rest = later;
    }
    assert_eq!((&whole, &end), (&cut, &cut_end));

    // A header block costs at least a frame header; an indexed byte becomes a field of the tables at
    // most, and 32 KiB end the connection. So a block of n bytes is at most 32 KiB and n of framing.
    let blocks = input.len() / 9 + 1;
    assert!(whole.len() <= 2 * input.len() + blocks * (40 << 10), "{} bytes", whole.len());

    let mut again = Vec::new();
    let second = Rewriter::default().feed(&whole, &mut again);
    if second.is_ok() {
        assert_eq!(whole, again);
    } else {
        panic!("what the adaptor wrote is refused: {second:?}");
    }
}
