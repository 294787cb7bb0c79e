//! HTTP/2 framing (RFC 9113 §4) as far as needed to find the header blocks in what a client sends, which are decoded and
//! encoded again, and to tell by the frames of both sides which requests have no answer yet.

use std::collections::BTreeSet;

use loona_hpack::Decoder;

/// What every client sends first, RFC 9113 §3.4.
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const HEADER: usize = 9;
pub(crate) const TYPE_HEADERS: u8 = 1;
const TYPE_CONTINUATION: u8 = 9;
pub(crate) const FLAG_END_STREAM: u8 = 0x1;
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
const PRIORITY: usize = 5;
/// SETTINGS_MAX_FRAME_SIZE of the server: the initial value, RFC 9113 §6.5.2.
const MAX_FRAME: usize = 16 * 1024;
/// Most encoded bytes of a header block.
const MAX_BLOCK: usize = 16 * 1024;
/// Most frames that a header block may come in; without a limit, empty ones could come for ever.
const MAX_BLOCK_FRAMES: u32 = 32;

/// Why the connection ends. Each is the client's fault; the server would have ended it too.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the client does not speak HTTP/2")]
    Preface,
    #[error("a header block is interrupted by another frame (type {0})")]
    Interrupted(u8),
    #[error("a CONTINUATION frame continues no header block")]
    Stray,
    #[error("a HEADERS frame is shorter than its padding and priority fields")]
    Short,
    #[error(
        "a header block is larger than {MAX_BLOCK} bytes, {MAX_LIST} bytes decoded or \
         {MAX_BLOCK_FRAMES} frames"
    )]
    TooLarge,
    #[error("a header block is malformed: {0}")]
    Malformed(String),
}

/// A frame's type, flags, stream and payload length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) length: usize,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: [u8; 4],
}

impl Frame {
    pub(crate) fn parse(bytes: [u8; HEADER]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes;
        let length = (usize::from(l0) << 16) | (usize::from(l1) << 8) | usize::from(l2);
        Self { length, kind, flags, stream: [s0, s1, s2, s3] }
    }

    fn put(&self, out: &mut Vec<u8>) {
        let [.., l0, l1, l2] = self.length.to_be_bytes();
        out.extend_from_slice(&[l0, l1, l2, self.kind, self.flags]);
        out.extend_from_slice(&self.stream);
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Of the stream field, the highest bit is reserved and must be ignored.
    pub(crate) fn stream_id(&self) -> u32 {
        u32::from_be_bytes(self.stream) & 0x7fff_ffff
    }
}

/// A header block being gathered.
#[derive(Debug)]
struct Block {
    first: Frame,
    priority: Option<[u8; PRIORITY]>,
    fragments: Vec<u8>,
    frames: u32,
}

#[derive(Debug)]
enum State {
    Preface(usize),
    Header([u8; HEADER], usize),
    /// Payload of a frame that is not ours to touch, with the bytes still to come.
    Pass(Frame, usize),
    /// Payload of HEADERS or CONTINUATION, gathered until it is complete.
    Gather(Frame, Vec<u8>),
}

/// Rewrites the client's side of one HTTP/2 connection; pure, fed with bytes as they come.
pub struct Rewriter {
    state: State,
    block: Option<Block>,
    calls: Calls,
    decoder: Decoder<'static>,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self::new()
    }
}

impl Rewriter {
    /// For a fresh connection.
    pub fn new() -> Self {
        Self {
            state: State::Preface(0),
            block: None,
            calls: Calls::default(),
            decoder: new_decoder(),
        }
    }

    pub(super) fn calls(&mut self) -> &mut Calls {
        &mut self.calls
    }

    /// Takes the next bytes from the client and appends to `out` what the server is to read. How the
    /// stream is cut into calls makes no difference.
    /// Where it fails, the connection must end, after what was appended to `out`.
    pub fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        while !input.is_empty() {
            let used = match &mut self.state {
                State::Preface(seen) => {
                    let rest = &PREFACE[*seen..];
                    let used = rest.iter().zip(input).take_while(|(want, got)| want == got).count();
                    out.extend_from_slice(&input[..used]);
                    *seen += used;
                    if used < rest.len().min(input.len()) {
                        return Err(Error::Preface);
                    }
                    if *seen == PREFACE.len() {
                        self.state = State::Header([0; HEADER], 0);
                    }
                    used
                }
                State::Header(bytes, seen) => {
                    let used = (HEADER - *seen).min(input.len());
                    bytes[*seen..*seen + used].copy_from_slice(&input[..used]);
                    *seen += used;
                    if *seen == HEADER {
                        let frame = Frame::parse(*bytes);
                        self.begin(frame, out)?;
                    }
                    used
                }
                State::Pass(frame, left) => {
                    let used = (*left).min(input.len());
                    out.extend_from_slice(&input[..used]);
                    *left -= used;
                    if *left == 0 {
                        let frame = *frame;
                        self.state = State::Header([0; HEADER], 0);
                        self.calls.client(frame);
                    }
                    used
                }
                State::Gather(frame, payload) => {
                    let used = (frame.length - payload.len()).min(input.len());
                    payload.extend_from_slice(&input[..used]);
                    if payload.len() == frame.length {
                        let frame = *frame;
                        let payload = std::mem::take(payload);
                        self.end(frame, &payload, out)?;
                    }
                    used
                }
            };
            input = &input[used..];
        }
        Ok(())
    }

    fn begin(&mut self, frame: Frame, out: &mut Vec<u8>) -> Result<(), Error> {
        match (&self.block, frame.kind) {
            (None, TYPE_HEADERS) => {}
            (None, TYPE_CONTINUATION) => return Err(Error::Stray),
            (None, _) => {
                frame.put(out);
                match frame.length {
                    0 => {
                        self.state = State::Header([0; HEADER], 0);
                        self.calls.client(frame);
                    }
                    length => self.state = State::Pass(frame, length),
                }
                return Ok(());
            }
            (Some(block), TYPE_CONTINUATION) if frame.stream_id() == block.first.stream_id() => {
                if block.frames >= MAX_BLOCK_FRAMES {
                    return Err(Error::TooLarge);
                }
            }
            (Some(_), kind) => return Err(Error::Interrupted(kind)),
        }
        let gathered = self.block.as_ref().map_or(0, |block| block.fragments.len());
        // The first frame may carry a byte of padding length, 255 of padding, and priority fields.
        if gathered + frame.length > MAX_BLOCK + 1 + 255 + PRIORITY {
            return Err(Error::TooLarge);
        }
        if frame.length == 0 {
            return self.end(frame, &[], out);
        }
        self.state = State::Gather(frame, Vec::with_capacity(frame.length));
        Ok(())
    }

    fn end(&mut self, frame: Frame, payload: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        self.state = State::Header([0; HEADER], 0);
        let mut block = match self.block.take() {
            None => Block::open(frame, payload)?,
            Some(mut block) => {
                block.fragments.extend_from_slice(payload);
                block.frames += 1;
                block
            }
        };
        if block.fragments.len() > MAX_BLOCK {
            return Err(Error::TooLarge);
        }
        if !frame.has(FLAG_END_HEADERS) {
            self.block = Some(block);
            return Ok(());
        }
        let fragments = std::mem::take(&mut block.fragments);
        let mut translated = Vec::with_capacity(2 * fragments.len() + 64);
        translate(&mut self.decoder, &fragments, &mut translated)?;
        block.put(&translated, out);
        self.calls.client(block.first);
        Ok(())
    }
}

impl Block {
    /// Begins with the payload of a HEADERS frame, RFC 9113 §6.2.
    fn open(first: Frame, mut payload: &[u8]) -> Result<Self, Error> {
        let padding = if first.has(FLAG_PADDED) {
            let (length, rest) = payload.split_first().ok_or(Error::Short)?;
            payload = rest;
            usize::from(*length)
        } else {
            0
        };
        let priority = if first.has(FLAG_PRIORITY) {
            let (fields, rest) = payload.split_first_chunk::<PRIORITY>().ok_or(Error::Short)?;
            payload = rest;
            Some(*fields)
        } else {
            None
        };
        let fragment = payload.len().checked_sub(padding).ok_or(Error::Short)?;
        Ok(Self { first, priority, fragments: payload[..fragment].to_vec(), frames: 1 })
    }

    /// Writes HEADERS with `translated`, and CONTINUATION where it does not fit into one frame.
    fn put(&self, translated: &[u8], out: &mut Vec<u8>) {
        let priority = self.priority.as_ref().map_or(&[][..], |fields| &fields[..]);
        let room = MAX_FRAME - priority.len();
        let (mut fragment, mut rest) = translated.split_at(room.min(translated.len()));
        let mut frame = Frame {
            length: priority.len() + fragment.len(),
            flags: self.first.flags & (FLAG_END_STREAM | FLAG_PRIORITY),
            ..self.first
        };
        let mut fields = priority;
        loop {
            if rest.is_empty() {
                frame.flags |= FLAG_END_HEADERS;
            }
            frame.put(out);
            out.extend_from_slice(fields);
            out.extend_from_slice(fragment);
            if rest.is_empty() {
                return;
            }
            (fragment, rest) = rest.split_at(MAX_FRAME.min(rest.len()));
            fields = &[];
            frame =
                Frame { length: fragment.len(), kind: TYPE_CONTINUATION, flags: 0, ..self.first };
        }
    }
}

/// The value every `:authority` gets.
const AUTHORITY: &[u8] = b"localhost";
/// SETTINGS_HEADER_TABLE_SIZE of the server: the initial value, RFC 9113 §6.5.2.
const TABLE_SIZE: usize = 4096;
/// Most bytes of a decoded header list, counted as SETTINGS_MAX_HEADER_LIST_SIZE is: 32 more a field.
/// The server itself takes 16 KiB.
pub(super) const MAX_LIST: usize = 32 * 1024;

/// Follows the client's dynamic table over the life of a connection.
fn new_decoder() -> Decoder<'static> {
    let mut decoder = Decoder::new();
    decoder.set_max_allowed_table_size(TABLE_SIZE);
    decoder
}

/// Appends the translation of `block` to `out`.
fn translate(decoder: &mut Decoder<'_>, block: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
    let mut list = 0_usize;
    decoder
        .decode_with_cb(block, |name, value| {
            list = list.saturating_add(name.len() + value.len() + 32);
            // The callback cannot stop the decoder, but it can stop gathering.
            if list <= MAX_LIST {
                let value = if *name == *b":authority" { AUTHORITY } else { &value };
                put_literal(out, &name, value);
            }
        })
        .map_err(|error| Error::Malformed(error.to_string()))?;
    if list > MAX_LIST { Err(Error::TooLarge) } else { Ok(()) }
}

/// A literal header field without indexing and with a new name, RFC 7541 §6.2.2, not Huffman coded.
pub(super) fn put_literal(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.push(0);
    put_string(out, name);
    put_string(out, value);
}

/// A string literal, RFC 7541 §5.2.
fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    let mut length = string.len();
    if length < 0x7f {
        out.push(low_byte(length));
    } else {
        out.push(0x7f);
        length -= 0x7f;
        while length >= 0x80 {
            out.push(low_byte(length) | 0x80);
            length >>= 7;
        }
        out.push(low_byte(length));
    }
    out.extend_from_slice(string);
}

fn low_byte(number: usize) -> u8 {
    number.to_le_bytes()[0]
}

const TYPE_DATA: u8 = 0;
const TYPE_RST_STREAM: u8 = 3;
/// Streams that are remembered; a server allows fewer at a time.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Calls {
    open: BTreeSet<u32>,
    asked: bool,
}

impl Calls {
    /// The client's frame: with its last one a request is there as a whole.
    fn client(&mut self, frame: Frame) {
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

    pub fn has_asked(&self) -> bool {
        self.asked
    }

    /// Whether a request has no answer yet.
    pub fn is_open(&self) -> bool {
        !self.open.is_empty()
    }
}

fn ends(frame: Frame) -> bool {
    matches!(frame.kind, TYPE_DATA | TYPE_HEADERS) && frame.has(FLAG_END_STREAM)
}

#[derive(Debug, Default)]
pub(crate) struct Answers {
    header: [u8; HEADER],
    seen: usize,
    payload: usize,
}

impl Answers {
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
