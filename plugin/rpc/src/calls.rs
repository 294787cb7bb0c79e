//! Which requests of an HTTP/2 connection have been read and not yet answered, by the frames of both sides.

use std::collections::BTreeSet;

use super::authority::frames::{FLAG_END_STREAM, Frame, HEADER, TYPE_HEADERS};

const TYPE_DATA: u8 = 0;
const TYPE_RST_STREAM: u8 = 3;
/// Streams that are remembered; a server allows fewer at a time.
const MOST: usize = 1024;

/// The open requests of one connection.
#[derive(Debug, Default)]
pub struct Calls {
    open: BTreeSet<u32>,
    asked: bool,
}

impl Calls {
    /// The client's frame: with its last one a request is there as a whole.
    pub(super) fn client(&mut self, frame: Frame) {
        if ends(frame) {
            self.asked = true;
            if self.open.len() < MOST {
                self.open.insert(frame.stream_id());
            }
        } else if frame.kind == TYPE_RST_STREAM {
            self.open.remove(&frame.stream_id());
        }
    }

    fn server(&mut self, frame: Frame) {
        if ends(frame) || frame.kind == TYPE_RST_STREAM {
            self.open.remove(&frame.stream_id());
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

/// Whether its sender's side of the stream is over with it.
fn ends(frame: Frame) -> bool {
    matches!(frame.kind, TYPE_DATA | TYPE_HEADERS) && frame.has(FLAG_END_STREAM)
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
                self.payload = Frame::parse(self.header).length;
            }
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            if self.payload == 0 {
                self.seen = 0;
                calls.server(Frame::parse(self.header));
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
        let client = |calls: &mut Calls, kind, flags, stream: u32| {
            calls.client(Frame { length: 0, kind, flags, stream: stream.to_be_bytes() });
        };
        client(&mut calls, TYPE_HEADERS, 0x4, 1);
        assert!(!calls.has_asked() && !calls.is_open(), "the body is to come");
        client(&mut calls, TYPE_DATA, FLAG_END_STREAM, 1);
        client(&mut calls, TYPE_HEADERS, FLAG_END_STREAM | 0x4, 3);
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
            client(&mut calls, TYPE_DATA, FLAG_END_STREAM, 1);
            for (n, bytes) in answer.chunks(piece).enumerate() {
                assert!(calls.is_open(), "piece {n} of {piece}");
                answers.feed(bytes, &mut calls);
            }
            assert!(!calls.is_open() && calls.has_asked());
        }
        // Given up by either side.
        client(&mut calls, TYPE_RST_STREAM, 0, 1);
        Answers::default().feed(&frame(TYPE_RST_STREAM, 0, 3, 4), &mut calls);
        assert!(!calls.is_open());
    }
}
