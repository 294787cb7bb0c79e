//! Which requests of an HTTP/2 connection have been read and not yet answered, by the frames of both sides.

use std::collections::BTreeSet;

/// Bytes of a frame header (RFC 9113 §4.1).
const HEADER: usize = 9;
const TYPE_DATA: u8 = 0;
const TYPE_HEADERS: u8 = 1;
const TYPE_RST_STREAM: u8 = 3;
const FLAG_END_STREAM: u8 = 0x1;
/// Streams that are remembered; a server allows fewer at a time.
const MOST: usize = 1024;

/// The open requests of one connection.
#[derive(Debug, Default)]
pub struct Calls {
    open: BTreeSet<u32>,
    asked: bool,
}

impl Calls {
    /// The client's frame, of this stream: with its last one a request is there as a whole.
    pub(super) fn client(&mut self, kind: u8, flags: u8, stream: u32) {
        match kind {
            TYPE_DATA | TYPE_HEADERS if flags & FLAG_END_STREAM != 0 => {
                self.asked = true;
                if self.open.len() < MOST {
                    self.open.insert(stream);
                }
            }
            TYPE_RST_STREAM => {
                self.open.remove(&stream);
            }
            _ => {}
        }
    }

    fn server(&mut self, kind: u8, flags: u8, stream: u32) {
        let ends = matches!(kind, TYPE_DATA | TYPE_HEADERS) && flags & FLAG_END_STREAM != 0;
        if ends || kind == TYPE_RST_STREAM {
            self.open.remove(&stream);
        }
    }

    /// Whether there has been a request.
    pub fn has_asked(&self) -> bool {
        self.asked
    }

    /// Whether a request has no answer yet.
    pub fn is_open(&self) -> bool {
        !self.open.is_empty()
    }
}

/// Reads the frame headers of what a server writes.
#[derive(Debug, Default)]
pub(super) struct Answers {
    header: [u8; HEADER],
    seen: usize,
    /// Bytes to come of the frame whose header was read.
    payload: usize,
}

impl Answers {
    /// The next bytes, however they are cut.
    pub fn feed(&mut self, mut bytes: &[u8], calls: &mut Calls) {
        while !bytes.is_empty() {
            if self.seen < HEADER {
                let taken = (HEADER - self.seen).min(bytes.len());
                self.header[self.seen..self.seen + taken].copy_from_slice(&bytes[..taken]);
                self.seen += taken;
                bytes = &bytes[taken..];
                if self.seen < HEADER {
                    return;
                }
                let [l0, l1, l2, ..] = self.header;
                self.payload = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
            }
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            if self.payload == 0 {
                self.seen = 0;
                let [.., kind, flags, s0, s1, s2, s3] = self.header;
                calls.server(kind, flags, u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: usize) -> Vec<u8> {
        let [_, l0, l1, l2] = u32::try_from(payload).unwrap().to_be_bytes();
        let mut bytes = vec![l0, l1, l2, kind, flags];
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.resize(HEADER + payload, 0xff);
        bytes
    }

    #[test]
    fn a_request_is_open_from_its_last_byte_to_the_answers() {
        let mut calls = Calls::default();
        calls.client(TYPE_HEADERS, 0x4, 1);
        assert!(!calls.has_asked() && !calls.is_open(), "the body is to come");
        calls.client(TYPE_DATA, FLAG_END_STREAM, 1);
        calls.client(TYPE_HEADERS, FLAG_END_STREAM | 0x4, 3);
        assert!(calls.has_asked() && calls.is_open());
        let settings = frame(4, 0x1, 0, 0);
        let answer = [
            settings,
            frame(TYPE_HEADERS, 0x4, 1, 30),
            frame(TYPE_DATA, 0, 1, 70_000),
            frame(TYPE_HEADERS, 0x5, 1, 7),
        ]
        .concat();
        for piece in [1, 8, 1000, answer.len()] {
            let (mut calls, mut answers) = (Calls::default(), Answers::default());
            calls.client(TYPE_DATA, FLAG_END_STREAM, 1);
            for (n, bytes) in answer.chunks(piece).enumerate() {
                assert!(calls.is_open(), "piece {n} of {piece}");
                answers.feed(bytes, &mut calls);
            }
            assert!(!calls.is_open() && calls.has_asked());
        }
        // Given up by either side.
        calls.client(TYPE_RST_STREAM, 0, 1);
        Answers::default().feed(&frame(TYPE_RST_STREAM, 0, 3, 4), &mut calls);
        assert!(!calls.is_open());
    }
}
