//! What readers cost. In a program of its own: memory is the whole process's.

#[path = "server/common.rs"]
#[allow(dead_code)]
mod common;

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use tessera_view::fixtures::{Layout, MadeUp};
use tessera_web::client::{Client, Endpoint};
use tessera_web::{Options, Server};

use common::{Script, Scripted};

/// Resident memory of this process, MiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[tokio::test]
async fn many_streams_of_equal_rights_cost_little_more_than_one() {
    let layout = Layout { nodes: 80, gpus: 8, ..Layout::default() };
    let fleet = MadeUp::new(layout, 0).fleet();
    let source = Scripted::new(Script { fleet, ..Script::default() });
    let mut options = Options::new(Arc::new(source));
    options.listen = vec!["127.0.0.1:0".parse().unwrap()];
    // An encoding takes a while without optimisation.
    options.interval = Duration::from_secs(3);
    let server = Server::start(options).unwrap();
    let address = server.bound().await.unwrap();
    let client = Client::new(Endpoint::Plain(address));
    let mut open = Vec::new();
    let mut first = 0;
    for number in 0..16 {
        let stream = client.ask("/api/v1/stream", "text/event-stream").await.unwrap();
        assert_eq!(stream.status(), 200);
        let mut body = stream.into_body();
        // Some read all; the others read the beginning of what is sent, and no more.
        let mut ended = false;
        while !ended {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            ended = number % 2 == 1 || frame.ends_with(b"\n\n");
        }
        open.push(body);
        if number == 0 {
            first = resident();
        }
    }
    let grown = resident().saturating_sub(first);
    // A fleet of this size is 3 MiB.
    assert!(grown < 20, "15 more streams took {grown} MiB");
}
