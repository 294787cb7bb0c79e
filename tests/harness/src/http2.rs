//! A gRPC client that sends any `:authority`, valid or not, over a Unix socket.

use std::path::Path;

use loona_hpack::Decoder;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const ACK: u8 = 0x1;

/// How a call ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer<T> {
    /// `grpc-status: 0` with this message.
    Ok(T),
    /// Another `grpc-status`, with its message.
    Status(String, String),
    /// RST_STREAM with this error code; 1 is PROTOCOL_ERROR.
    Reset(u32),
}

/// One connection, with the tables that go with it.
pub struct Client {
    stream: UnixStream,
    authority: Vec<u8>,
    next_stream: u32,
    decoder: Decoder<'static>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("next_stream", &self.next_stream).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects; every request will carry `authority`.
    pub async fn connect(socket: &Path, authority: &[u8]) -> Self {
        let mut client = Self {
            stream: UnixStream::connect(socket).await.expect("a server"),
            authority: authority.to_vec(),
            next_stream: 1,
            decoder: Decoder::new(),
        };
        client.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        client.send(SETTINGS, 0, 0, &[]).await;
        client
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("an open connection");
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let [.., l0, l1, l2] = payload.len().to_be_bytes();
        let mut frame = vec![l0, l1, l2, kind, flags];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.write(&frame).await;
    }

    async fn receive(&mut self) -> (u8, u8, u32, Vec<u8>) {
        let mut header = [0; 9];
        self.stream.read_exact(&mut header).await.expect("a frame");
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = header;
        let length = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload).await.expect("a frame");
        (kind, flags, u32::from_be_bytes([s0, s1, s2, s3]), payload)
    }

    /// As grpc-go does it: the first request puts its fields into the dynamic table (RFC 7541 §6.2.1),
    /// later ones refer to them (§6.1). The path is always sent in full.
    fn header_block(&self, id: u32, path: &str) -> Vec<u8> {
        let table: [(&[u8], &[u8]); 6] = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", &self.authority),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"grpc-go/1.27.1"),
            (b"te", b"trailers"),
        ];
        // A length below 127 is one byte; a socket's path, percent-encoded, may need two.
        let string = |text: &[u8]| match u8::try_from(text.len()) {
            Ok(short @ ..127) => [&[short], text].concat(),
            _ => {
                let rest = text.len() - 127;
                let low = u8::try_from(rest % 128).unwrap_or_default();
                let high = u8::try_from(rest / 128).expect("a field of less than 16 KiB");
                let length = if high == 0 { vec![127, low] } else { vec![127, low | 0x80, high] };
                [&length, text].concat()
            }
        };
        let mut block = vec![];
        for (index, (name, value)) in (0_u8..).zip(table) {
            if id == 1 {
                block.push(0x40);
                block.extend(string(name));
                block.extend(string(value));
            } else {
                // The newest entry has index 62.
                block.push(0x80 | (62 + 5 - index));
            }
            if index == 1 {
                block.push(0);
                block.extend(string(b":path"));
                block.extend(string(path.as_bytes()));
            }
        }
        block
    }

    /// Sends a request; its header block in pieces of `piece` bytes. Gives the stream's id.
    async fn request(&mut self, path: &str, message: &impl Message, piece: usize) -> u32 {
        let id = self.next_stream;
        self.next_stream += 2;
        let block = self.header_block(id, path);
        let pieces: Vec<_> = block.chunks(piece).collect();
        for (index, piece) in pieces.iter().enumerate() {
            let kind = if index == 0 { HEADERS } else { CONTINUATION };
            let flags = if index + 1 == pieces.len() { END_HEADERS } else { 0 };
            self.send(kind, flags, id, piece).await;
        }
        let message = message.encode_to_vec();
        let mut payload = vec![0];
        payload.extend(u32::try_from(message.len()).expect("a small message").to_be_bytes());
        payload.extend(message);
        self.send(DATA, END_STREAM, id, &payload).await;
        id
    }

    /// The next message on stream `id`, or how it ended. Messages are as small as a frame.
    async fn message<T: Message + Default>(&mut self, id: u32) -> Answer<T> {
        loop {
            let (kind, flags, stream, payload) = self.receive().await;
            match kind {
                SETTINGS if flags & ACK == 0 => self.send(SETTINGS, ACK, 0, &[]).await,
                PING if flags & ACK == 0 => self.send(PING, ACK, 0, &payload).await,
                RST_STREAM if stream == id => {
                    let code = payload.try_into().expect("four bytes");
                    return Answer::Reset(u32::from_be_bytes(code));
                }
                HEADERS => {
                    assert_ne!(flags & END_HEADERS, 0, "the server's header blocks are small");
                    let fields = self.decoder.decode(&payload).expect("a header block");
                    let field = |name: &str| {
                        let field = fields.iter().find(|(field, _)| field == name.as_bytes())?;
                        Some(String::from_utf8_lossy(&field.1).into_owned())
                    };
                    if let Some(status) = field("grpc-status")
                        && stream == id
                    {
                        let message = field("grpc-message").unwrap_or_default();
                        return Answer::Status(status, message);
                    }
                }
                DATA if stream == id && payload.len() >= 5 => {
                    return Answer::Ok(T::decode(&payload[5..]).expect("a message"));
                }
                _ => {}
            }
        }
    }

    pub async fn call<T: Message + Default>(
        &mut self,
        path: &str,
        message: &impl Message,
        piece: usize,
    ) -> Answer<T> {
        let id = self.request(path, message, piece).await;
        let answer = self.message(id).await;
        if let Answer::Ok(_) = answer {
            let end = self.message::<T>(id).await;
            assert!(matches!(end, Answer::Status(status, _) if status == "0"));
        }
        answer
    }
}
