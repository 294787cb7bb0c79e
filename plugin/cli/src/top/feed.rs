//! Asking, on a thread of its own: a plugin that hangs must not hang the view.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tessera_view::fleet::Fleet;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::model::Model;
use crate::source::Source;
use tessera_model::clock::unix_ms;

/// What comes in.
pub(super) enum FeedEvent {
    /// What there is, and when it came.
    Answer(Box<Fleet>, Duration),
    /// It does not answer, and why.
    Silence(String),
    /// A signal asked the process to end.
    End,
}

/// The thread's other end.
pub(super) struct Feed {
    news: Receiver<FeedEvent>,
}

impl Feed {
    /// Starts asking once in `interval`.
    pub fn start(source: Source, interval: Duration) -> io::Result<Self> {
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
        Ok(Feed { news })
    }

    /// What comes within `wait`.
    pub fn next(&self, wait: Duration) -> Option<FeedEvent> {
        match self.news.recv_timeout(wait) {
            Ok(news) => Some(news),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(FeedEvent::End),
        }
    }
}

/// Takes the news over into the model.
pub(super) fn apply(model: &mut Model, news: FeedEvent) {
    match news {
        FeedEvent::Answer(fleet, at) => model.take(*fleet, at),
        FeedEvent::Silence(reason) => model.miss(reason, unix_ms()),
        FeedEvent::End => model.quit = true,
    }
}

async fn ask(source: Source, interval: Duration, sender: Sender<FeedEvent>) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let news = match source.fleet().await {
            Ok(fleet) => FeedEvent::Answer(Box::new(fleet), began.elapsed()),
            Err(failure) => FeedEvent::Silence(failure.text),
        };
        if sender.send(news).is_err() {
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
