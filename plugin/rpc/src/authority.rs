//! Makes the requests of clients that send a socket path as `:authority` acceptable to Rust's HTTP/2.
//!
//! Clients on gRPC's C core (Python's grpcio among them) send the percent-encoded path, too.
//! Kubelets before 1.26 send the percent-encoded path of the plugin's socket as `:authority`
//! (`%2Fvar%2Flib%2Fkubelet…`), and all versions read do so on plugin registration sockets. `http`
//! and `h2` hold that for malformed (RFC 3986 §3.2.2 allows no such host) and reset the stream with
//! PROTOCOL_ERROR, before any code of ours could answer. Patching those crates is not an option, so
//! [`Requests`] stands between socket and server and rewrites what the client sends:
//!
//! - The preface and every frame other than HEADERS and CONTINUATION pass byte by byte, DATA and
//!   WINDOW_UPDATE among them: flow control stays between client and server.
//! - A header block is gathered, decoded with a decoder that follows the client's dynamic table, and
//!   encoded again with `:authority: localhost`, every field as a *literal without indexing*
//!   (RFC 7541 §6.2.2). The server's dynamic table therefore stays empty, no index of the client's
//!   can go astray, and no table size update needs to be passed on: the server never announces
//!   another SETTINGS_HEADER_TABLE_SIZE than the initial 4096, which bounds the client's updates.
//! - What the server sends passes untouched; its dynamic table is the other direction's.
//!
//! Memory is bounded, whatever arrives: see [`Error`] for what ends the connection.
//!
//! For decoding, `loona-hpack` is used: it bounds the dynamic table and passes fields to a callback, so
//! that a small block cannot be inflated in memory. `httlib-hpack` indexes past the end of truncated
//! input, `hpack` is abandoned (RUSTSEC-2023-0084/0085).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use tokio::io::{AsyncRead, ReadBuf};

// === HTTP/2 framing (RFC 9113 §4), as far as needed to find the header blocks in what a client sends ===

/// What every client sends first, RFC 9113 §3.4.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER: usize = 9;
const TYPE_HEADERS: u8 = 1;
const TYPE_CONTINUATION: u8 = 9;
const FLAG_END_STREAM: u8 = 0x1;
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
struct Frame {
    length: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl Frame {
    fn parse(bytes: [u8; HEADER]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes;
        let length = (usize::from(l0) << 16) | (usize::from(l1) << 8) | usize::from(l2);
        Self { length, kind, flags, stream: [s0, s1, s2, s3] }
    }

    fn put(&self, out: &mut Vec<u8>) {
        let [.., l0, l1, l2] = self.length.to_be_bytes();
        out.extend_from_slice(&[l0, l1, l2, self.kind, self.flags]);
        out.extend_from_slice(&self.stream);
    }

    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Of the stream field, the highest bit is reserved and must be ignored.
    fn stream_id(&self) -> u32 {
        u32::from_be_bytes(self.stream) & 0x7fff_ffff
    }
}

/// A header block being gathered.
#[derive(Debug)]
struct Block {
    first: Frame,
    fragments: Vec<u8>,
    frames: u32,
}

#[derive(Debug)]
enum State {
    Preface(usize),
    Header([u8; HEADER], usize),
    /// Payload of a frame that is not ours to touch: bytes still to come.
    Pass(usize),
    /// Payload of HEADERS or CONTINUATION, gathered until it is complete.
    Gather(Frame, Vec<u8>),
}

/// Rewrites the client's side of one HTTP/2 connection; pure, fed with bytes as they come.
pub struct Rewriter {
    state: State,
    block: Option<Block>,
    /// Follows the client's dynamic table over the life of the connection.
    decoder: Decoder<'static>,
}

impl Default for Rewriter {
    /// For a fresh connection.
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(TABLE_SIZE);
        Self { state: State::Preface(0), block: None, decoder }
    }
}

impl Rewriter {
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
                State::Pass(left) => {
                    let used = (*left).min(input.len());
                    out.extend_from_slice(&input[..used]);
                    *left -= used;
                    if *left == 0 {
                        self.state = State::Header([0; HEADER], 0);
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
                self.state = match frame.length {
                    0 => State::Header([0; HEADER], 0),
                    length => State::Pass(length),
                };
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
        if first.has(FLAG_PRIORITY) {
            // Deprecated, and of no use to a server.
            payload = payload.get(PRIORITY..).ok_or(Error::Short)?;
        }
        let fragment = payload.len().checked_sub(padding).ok_or(Error::Short)?;
        Ok(Self { first, fragments: payload[..fragment].to_vec(), frames: 1 })
    }

    /// Writes HEADERS with `translated`, and CONTINUATION where it does not fit into one frame.
    fn put(&self, translated: &[u8], out: &mut Vec<u8>) {
        let (mut kind, mut flags) = (TYPE_HEADERS, self.first.flags & FLAG_END_STREAM);
        let mut rest = translated;
        loop {
            let (fragment, more) = rest.split_at(MAX_FRAME.min(rest.len()));
            rest = more;
            if rest.is_empty() {
                flags |= FLAG_END_HEADERS;
            }
            Frame { length: fragment.len(), kind, flags, ..self.first }.put(out);
            out.extend_from_slice(fragment);
            if rest.is_empty() {
                return;
            }
            (kind, flags) = (TYPE_CONTINUATION, 0);
        }
    }
}

/// The value every `:authority` gets.
const AUTHORITY: &[u8] = b"localhost";
/// SETTINGS_HEADER_TABLE_SIZE of the server: the initial value, RFC 9113 §6.5.2.
const TABLE_SIZE: usize = 4096;
/// Most bytes of a decoded header list, counted as SETTINGS_MAX_HEADER_LIST_SIZE is: 32 more a field.
/// The server itself takes 16 KiB.
const MAX_LIST: usize = 32 * 1024;

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
fn put_literal(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
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

// === A connection ===

const CHUNK: usize = 4096;
/// An output buffer that has grown beyond this is given back once it is empty.
const KEEP: usize = 16 * 1024;

/// What the client of a connection sends, with `:authority: localhost` in its header blocks.
pub(crate) struct Requests {
    rewriter: Rewriter,
    chunk: Box<[u8]>,
    /// Rewritten bytes, handed out from `taken` on.
    out: Vec<u8>,
    taken: usize,
    failed: Option<Error>,
}

impl Requests {
    pub(crate) fn new() -> Self {
        let (rewriter, chunk) = (Rewriter::default(), vec![0; CHUNK].into_boxed_slice());
        Self { rewriter, chunk, out: Vec::new(), taken: 0, failed: None }
    }

    pub(crate) fn poll_read(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            // What was rewritten before an error still reaches the server.
            if self.hand_out(buf) {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = &self.failed {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error.clone())));
            }
            let mut chunk = ReadBuf::new(&mut self.chunk);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            if let Err(error) = self.rewriter.feed(chunk.filled(), &mut self.out) {
                tracing::warn!(%error, "closing a connection to a socket of the plugin");
                self.failed = Some(error);
            }
        }
    }

    /// Moves rewritten bytes into `buf`; false if there are none.
    fn hand_out(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let waiting = &self.out[self.taken..];
        if waiting.is_empty() {
            return false;
        }
        let count = waiting.len().min(buf.remaining());
        buf.put_slice(&waiting[..count]);
        self.taken += count;
        if self.taken == self.out.len() {
            self.taken = 0;
            self.out.clear();
            if self.out.capacity() > KEEP {
                self.out = Vec::new();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
