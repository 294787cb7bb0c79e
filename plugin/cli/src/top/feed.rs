//! Asking, on a thread of its own: a plugin that hangs must not hang the view.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tessera_view::fleet::Fleet;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::source::Source;

/// What there is, and when it came; or why nobody answers.
pub(super) type News = Result<(Fleet, Duration), String>;

/// Starts asking once in `interval`. The channel ends where a signal asks the process to end.
pub(super) fn start(source: Source, interval: Duration) -> io::Result<Receiver<News>> {
    let (sender, news) = channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // From here on no signal ends the process with the terminal taken.
    let signals = {
        let _entered = runtime.enter();
        Signals::new()?
    };
    std::thread::Builder::new().name("feed".into()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                () = ask(source, interval, sender) => {}
                () = signals.one() => {}
            }
        });
    })?;
    Ok(news)
}

async fn ask(source: Source, interval: Duration, sender: Sender<News>) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let news = source.fleet().await.map_err(|failure| failure.text);
        if sender.send(news.map(|fleet| (fleet, began.elapsed()))).is_err() {
            return;
        }
    }
}

/// Signals that end the process.
struct Signals([Signal; 4]);

impl Signals {
    fn new() -> io::Result<Self> {
        let kinds = [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
            SignalKind::quit(),
        ];
        let [a, b, c, d] = kinds.map(signal);
        Ok(Signals([a?, b?, c?, d?]))
    }

    /// Until one of them comes.
    async fn one(mut self) {
        let [a, b, c, d] = &mut self.0;
        tokio::select! {
            _ = a.recv() => {}
            _ = b.recv() => {}
            _ = c.recv() => {}
            _ = d.recv() => {}
        }
    }
}
