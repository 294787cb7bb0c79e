//! Clients that are slow, greedy, or speak no HTTP: they are cut off, and others are answered meanwhile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;

use http_body_util::BodyExt;
use tessera_view::fleet::Fleet;
use tessera_web::client::{Client, Endpoint};
use tessera_web::fixtures::unverified;
use tessera_web::{Route, Tls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{Scripted, serve, small};
use crate::world::{World, short};

/// Writes these bytes, and reads until the server closes.
async fn speak(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The server may have closed before all is written.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

async fn is_served(address: SocketAddr) {
    let fleet: Fleet = Client::new(Endpoint::Plain(address)).get("/api/v1/fleet").await.unwrap();
    assert_eq!(fleet.nodes.len(), 1);
}

#[tokio::test]
async fn what_is_no_request_is_refused_and_others_are_answered() {
    let (_server, address) = serve(Scripted::new(small())).await;
    let large = "x".repeat(1 << 20);
    let many: String = (0..500).map(|n| format!("h{n}: x\r\n")).collect();
    for (what, bytes, status) in [
        ("garbage", b"\x16\x03\x01\x02\x00\x01\xff\xff\r\n\r\n".to_vec(), "400"),
        ("a header of 1 MiB", format!("GET / HTTP/1.1\r\nx: {large}\r\n\r\n").into_bytes(), "431"),
        ("500 headers", format!("GET / HTTP/1.1\r\n{many}\r\n").into_bytes(), "431"),
        ("a path of 1 MiB", format!("GET /{large} HTTP/1.1\r\n\r\n").into_bytes(), "4"),
        ("a null", b"GET /api/v1/fleet\0 HTTP/1.1\r\n\r\n".to_vec(), "400"),
        ("not UTF-8", b"GET /api/v1/fleet?node=%ff%fe HTTP/1.1\r\nconnection: close\r\n\r\n".to_vec(), "200"),
        ("raw bytes", b"GET /api/v1/fleet?node=\xff\xfe HTTP/1.1\r\nconnection: close\r\n\r\n".to_vec(), ""),
        ("both lengths", b"GET / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\n\r\n".to_vec(), ""),
        ("another name", b"GET /api/v1/fleet HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".to_vec(), "421"),
    ] {
        let answer = speak(address, &bytes).await;
        // A reset may come before the answer was read.
        let is_refused = answer.is_empty() || answer.starts_with(&format!("HTTP/1.1 {status}"));
        assert!(is_refused, "{what}: {}", answer.lines().next().unwrap_or_default());
        is_served(address).await;
    }
    for route in Route::ALL {
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "NOPE"] {
            let request = format!(
                "{method} {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
                route.path()
            );
            let answer = speak(address, request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 405"), "{method} {}: {answer}", route.path());
            assert!(!answer.to_ascii_lowercase().contains("access-control-allow"), "{answer}");
        }
    }
}

#[tokio::test]
async fn streams_are_so_many_and_no_more_and_leave_with_their_readers() {
    let source = Scripted::new(small());
    let (_server, address) = serve(source.clone()).await;
    let client = Client::new(Endpoint::Plain(address));
    let mut open = Vec::new();
    let refused = loop {
        let stream = client.ask("/api/v1/stream", "text/event-stream").await.unwrap();
        match stream.status().as_u16() {
            200 => open.push(stream),
            status => break status,
        }
        assert!(open.len() < 1000, "there is no bound");
    };
    assert_eq!((refused, open.len()), (429, 16));
    is_served(address).await;
    drop(open);
    loop {
        let stream = client.ask("/api/v1/stream", "text/event-stream").await.unwrap();
        if stream.status() == 200 {
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_stream_says_what_changed_and_nothing_else() {
    let source = Scripted::new(small());
    let (_server, address) = serve(source.clone()).await;
    let client = Client::new(Endpoint::Plain(address));
    let mut body = client.ask("/api/v1/stream", "text/event-stream").await.unwrap().into_body();
    let mut events: Vec<String> = Vec::new();
    for number in 0_i64..3 {
        let mut text = String::new();
        while !text.ends_with("\n\n") {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            text.push_str(std::str::from_utf8(&frame).unwrap());
        }
        assert!(text.starts_with("event: fleet\ndata: {"), "{text}");
        events.push(text);
        let mut script = source.0.lock().unwrap();
        // Clocks go on, which is no news; a figure changes, which is.
        script.fleet.at_unix_ms += 1000;
        script.fleet.nodes[0].answered_unix_ms += 1000;
        let view = script.fleet.nodes[0].view.as_mut().unwrap();
        view.at_unix_ms += 1000;
        view.tenants[0].refusals = number.unsigned_abs() + 1;
    }
    for (number, event) in events.iter().enumerate() {
        assert!(event.contains(&format!("\"refusals\":{number}")), "{event}");
    }
}

/// What is written to the log while tokens go by.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_token_is_ever_logged() {
    let written = Written::default();
    let writer = written.clone();
    let log = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(log.finish()).unwrap();
    let world = World::new(short(), Tls::SelfSigned).await;
    let client = Client::new(Endpoint::Secure(world.address, unverified()));
    world.cluster.with(|store| {
        store.users.accept("s3cret-good", "ann", &[]);
        store.users.allow("ann", "");
    });
    for temper in [
        tessera_cluster::fixtures::Temper::Works,
        tessera_cluster::fixtures::Temper::Answers(500, "no".into()),
        tessera_cluster::fixtures::Temper::Answers(403, "no".into()),
    ] {
        world.cluster.set_temper(temper);
        for token in ["s3cret-good", "s3cret-bad"] {
            let _ = client.clone().with_token(token).get::<Fleet>("/api/v1/fleet").await;
        }
        tokio::time::sleep(short().token).await;
    }
    let long = format!("s3cret-{}", "x".repeat(20_000));
    let _ = client.with_token(&long).get::<Fleet>("/api/v1/fleet").await;
    let log = String::from_utf8_lossy(&written.0.lock().unwrap()).into_owned();
    assert!(log.contains("nobody can be authorised"), "the log is listened to");
    assert!(!log.contains("s3cret"), "a token is in the log");
}
