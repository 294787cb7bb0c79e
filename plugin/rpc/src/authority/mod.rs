//! Makes the requests of clients that send a socket path as `:authority` acceptable to Rust's HTTP/2.
//!
//! Clients on gRPC's C core (Python's grpcio among them) send the percent-encoded path, too.
//! Kubelets before 1.26 send the percent-encoded path of the plugin's socket as `:authority`
//! (`%2Fvar%2Flib%2Fkubelet…`), and all versions read do so on plugin registration sockets. `http`
//! and `h2` hold that for malformed (RFC 3986 §3.2.2 allows no such host) and reset the stream with
//! PROTOCOL_ERROR, before any code of ours could answer. Patching those crates is no option, so
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
//! For decoding, `loona-hpack` is used. It is kept (releases to 0.4.3, which removed the last known
//! panic on truncated input), bounds the dynamic table and passes fields to a callback, so that a
//! small block cannot be inflated in memory. `httlib-hpack` indexes past the end of truncated input,
//! `hpack` is abandoned (RUSTSEC-2023-0084/0085), `fluke-hpack` is loona's former name.

pub(crate) mod frames;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use frames::Calls;
pub use frames::{Error, Rewriter};

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
        let (rewriter, chunk) = (Rewriter::new(), vec![0; CHUNK].into_boxed_slice());
        Self { rewriter, chunk, out: Vec::new(), taken: 0, failed: None }
    }

    pub(crate) fn calls(&mut self) -> &mut Calls {
        self.rewriter.calls()
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
