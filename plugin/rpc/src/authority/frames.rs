//! HTTP/2 framing (RFC 9113 §4) as far as needed to find the header blocks in what a client sends.

use super::super::calls::Calls;
use super::block::{MAX_LIST, Translator};

/// What every client sends first, RFC 9113 §3.4.
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame header.
pub(crate) const HEADER: usize = 9;
pub(crate) const TYPE_HEADERS: u8 = 1;
const TYPE_CONTINUATION: u8 = 9;
pub(crate) const FLAG_END_STREAM: u8 = 0x1;
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
/// Bytes of the priority fields in HEADERS.
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
    /// The first bytes are not HTTP/2's.
    #[error("the client does not speak HTTP/2")]
    Preface,
    /// Something else than the awaited CONTINUATION of the same stream.
    #[error("a header block is interrupted by another frame (type {0})")]
    Interrupted(u8),
    /// CONTINUATION that continues nothing.
    #[error("a CONTINUATION frame continues no header block")]
    Stray,
    /// Padding or priority fields beyond the end of the frame.
    #[error("a HEADERS frame is shorter than its padding and priority fields")]
    Short,
    /// A header block is too long, encoded or decoded, or comes in too many frames.
    #[error(
        "a header block is larger than {MAX_BLOCK} bytes, {MAX_LIST} bytes decoded or \
         {MAX_BLOCK_FRAMES} frames"
    )]
    TooLarge,
    /// A header block cannot be decoded.
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
    /// The HEADERS frame it began with.
    first: Frame,
    priority: Option<[u8; PRIORITY]>,
    fragments: Vec<u8>,
    frames: u32,
}

#[derive(Debug)]
enum State {
    /// Bytes of the preface seen.
    Preface(usize),
    /// Bytes of a frame header seen.
    Header([u8; HEADER], usize),
    /// Payload of a frame that is not ours to touch, with the bytes still to come.
    Pass(Frame, usize),
    /// Payload of HEADERS or CONTINUATION, gathered until it is complete.
    Gather(Frame, Vec<u8>),
}

/// Rewrites the client's side of one HTTP/2 connection; pure, fed with bytes as they come.
#[derive(Debug)]
pub struct Rewriter {
    state: State,
    block: Option<Block>,
    calls: Calls,
    translator: Translator,
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
            translator: Translator::new(),
        }
    }

    /// The requests that have come, as far as they are complete.
    pub(super) fn calls(&mut self) -> &mut Calls {
        &mut self.calls
    }

    /// Takes the next bytes from the client and appends to `out` what the server is to read. How the
    /// stream is cut into calls makes no difference.
    ///
    /// # Errors
    /// The connection must end, after what was appended to `out`; feeding more is pointless.
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

    /// A frame header is complete.
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

    /// A frame of a header block is complete.
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
        self.translator.translate(&fragments, &mut translated)?;
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
