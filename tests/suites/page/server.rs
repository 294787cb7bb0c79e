//! `tessera-page-server`: the page over a made-up fleet, for tests and developers of the page.
//!
//! The first line of its output is the page's address. Each line of its input is a command, and each command's answer
//! is a line of JSON: `away NODE`, `back NODE`, `tick MILLISECONDS`, `fleet` (the model as it is), `refusals` (of all), `history NODE
//! SUBJECT SINCE STEP`, `waste`, `stop`, `start`, `formats` (the table of formats). It ends with its
//! input.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};
use tessera_view::fixtures::{Layout, MadeUp};
use tessera_view::fleet::Fleet;
use tessera_view::history::Query;
use tessera_web::fixtures::Fixture;
use tessera_web::{Options, Server};

mod formats;

#[derive(Parser)]
struct Asked {
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    #[arg(long, default_value_t = 2)]
    gpus: usize,
    #[arg(long, default_value_t = 4)]
    tenants: usize,
    #[arg(long)]
    hostile: bool,
    #[arg(long)]
    no_trouble: bool,
    #[arg(long, default_value_t = 1000)]
    interval_ms: u64,
}

fn main() -> Result<(), String> {
    let Asked { listen, nodes, gpus, tenants, hostile, no_trouble, interval_ms } = Asked::parse();
    let layout = Layout { nodes, gpus, tenants, hostile, trouble: !no_trouble };
    let fixture = Fixture::new(MadeUp::new(layout));
    let runtime =
        tokio::runtime::Builder::new_current_thread().build().map_err(|e| e.to_string())?;
    let start = |listen: SocketAddr| -> Result<(Server, SocketAddr), String> {
        let mut options = Options::new(Arc::new(fixture.clone()));
        options.listen = vec![listen];
        options.interval = Duration::from_millis(interval_ms);
        options.report = Arc::new(|_, amiss| {
            if let Some(amiss) = amiss {
                eprintln!("{amiss}");
            }
        });
        let server = Server::start(options).map_err(|e| e.to_string())?;
        let address = runtime.block_on(server.bound()).ok_or("it is not bound")?;
        Ok((server, address))
    };
    let (first, address) = start(listen)?;
    let mut server = Some(first);
    say(&format!("http://{address}/"));
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words.as_slice() {
            ["stop"] => {
                server = None;
                Value::Null
            }
            ["start"] => {
                // The address may still be held by connections that end.
                server = Some(start(address)?.0);
                Value::Null
            }
            words => command(&fixture, words)?,
        };
        say(&answer.to_string());
    }
    drop(server);
    Ok(())
}

fn command(fixture: &Fixture, words: &[&str]) -> Result<Value, String> {
    let mut made = fixture.made();
    Ok(match words {
        ["away", node] => {
            made.set_away(node, true);
            Value::Null
        }
        ["back", node] => {
            made.set_away(node, false);
            Value::Null
        }
        ["tick", ms] => {
            made.tick(ms.parse().map_err(|e| format!("tick: {e}"))?);
            Value::Null
        }
        ["fleet"] => json!(made.fleet()),
        ["refusals"] => json!(refusals(&made.fleet())),
        ["waste"] => json!(made.waste("")),
        ["history", node, subject, since, step] => json!(made.history(
            node,
            &Query {
                subject: (*subject).to_owned(),
                since_unix_ms: since.parse().map_err(|e| format!("history: {e}"))?,
                step_seconds: step.parse().map_err(|e| format!("history: {e}"))?,
                ..Query::default()
            }
        )),
        ["formats"] => formats::table(),
        other => return Err(format!("unknown command {other:?}")),
    })
}

/// Refusals of all tenants: a sum that moves with time, and that the page writes to the last digit.
fn refusals(fleet: &Fleet) -> u64 {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    views.flat_map(|view| &view.tenants).map(|tenant| tenant.refusals).sum()
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Without a reader there is nothing to serve; standard input ends next.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
