//! The connections that a listener of gRPC accepts: a bounded number of them, of which those that ask nothing make
//! room for new ones.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::authority::{Answers, Requests};
use tessera_system::connections::{Busy, Connections, Limits, Permit};
use tessera_system::descriptors::ListenerKind;

/// How long a client that has something to ask may be silent.
pub const SILENCE: Option<Duration> = Some(Duration::from_secs(10));

/// Connections of a listener in kubelet's directories, each with its authority rewritten.
pub fn incoming(
    listener: UnixListener,
    limits: Limits,
) -> impl Stream<Item = io::Result<Connection>> + Send {
    let connections = Connections::new(ListenerKind::Kubelet, limits);
    stream::unfold((listener, connections), |(listener, connections)| async move {
        let next = || async { Ok(listener.accept().await?.0) };
        let (stream, permit) = connections.accept(next, client).await;
        let over = Arc::clone(&permit);
        let connection = Connection {
            stream,
            requests: Requests::new(),
            answers: Answers::default(),
            over: Box::pin(async move { over.over().await }),
            permit,
            has_asked: false,
            busy: None,
        };
        Some((Ok(connection), (listener, connections)))
    })
}

/// A process is a client.
fn client(stream: &UnixStream) -> u128 {
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
    pid.and_then(|pid| u128::try_from(pid).ok()).unwrap_or(0)
}

pub struct Connection {
    stream: UnixStream,
    requests: Requests,
    answers: Answers,
    permit: Arc<Permit>,
    /// Done when its time is over, or somebody else needs its place.
    over: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_asked: bool,
    /// While a request has no answer.
    busy: Option<Busy>,
}

impl Connection {
    fn follow(&mut self) {
        let calls = self.requests.calls();
        // One that was answered or given up at once has been asked, too.
        let is_new = calls.is_open() || calls.has_asked() && !self.has_asked;
        if is_new && self.busy.is_none() {
            self.busy = Some(self.permit.begin());
        }
        self.has_asked = calls.has_asked();
        if !calls.is_open() {
            self.busy = None;
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, requests, .. } = &mut *self;
        let read = requests.poll_read(stream, cx, buf);
        // First: what has been read may be the request that it is spared for.
        self.follow();
        if read.is_pending() && self.over.as_mut().poll(cx).is_ready() {
            // It is read again before the connection's task has heard of this.
            self.over = Box::pin(std::future::ready(()));
            let text = "the connection has had its time, or makes room for another";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, text)));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { stream, requests, answers, .. } = &mut *self;
        let written = ready!(Pin::new(stream).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let part = left.min(buf.len());
            answers.feed(&buf[..part], requests.calls());
            left -= part;
        }
        self.follow();
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}
