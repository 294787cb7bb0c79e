//! Asking, on a thread of its own: a plugin that hangs must not hang the view.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::task::Poll;
use std::time::{Duration, Instant};

use nix::libc::{SIGCONT, SIGTSTP};
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
    /// A signal asked it to stop, as by `kill -TSTP`.
    Stop,
    /// It goes on after it was stopped.
    Again,
}

/// The thread's other end.
pub(super) struct Feed {
    news: Receiver<FeedEvent>,
}

impl Feed {
    /// Starts asking once in `interval`. It reports a stop to the owner of the terminal.
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
                    () = ask(source, interval, sender.clone()) => {}
                    () = signals.tell(&sender) => {}
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
        // Of the terminal, not of what it shows.
        FeedEvent::Stop | FeedEvent::Again => {}
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

/// Signals to the process.
struct Signals(Vec<(Signal, fn() -> FeedEvent)>);

impl Signals {
    fn new() -> io::Result<Self> {
        let end: fn() -> FeedEvent = || FeedEvent::End;
        let kinds: [(SignalKind, fn() -> FeedEvent); 6] = [
            (SignalKind::terminate(), end),
            (SignalKind::interrupt(), end),
            (SignalKind::hangup(), end),
            (SignalKind::quit(), end),
            (SignalKind::from_raw(SIGTSTP), || FeedEvent::Stop),
            (SignalKind::from_raw(SIGCONT), || FeedEvent::Again),
        ];
        let signals = kinds.into_iter().map(|(kind, news)| Ok((signal(kind)?, news)));
        signals.collect::<io::Result<_>>().map(Signals)
    }

    /// Until the end, or nobody listens.
    async fn tell(mut self, sender: &Sender<FeedEvent>) {
        loop {
            let news = std::future::poll_fn(|cx| {
                let mut all = self.0.iter_mut();
                let come = all.find_map(|(one, news)| one.poll_recv(cx).is_ready().then_some(news));
                come.map_or(Poll::Pending, |news| Poll::Ready(news()))
            })
            .await;
            let is_end = matches!(news, FeedEvent::End);
            if sender.send(news).is_err() || is_end {
                return;
            }
        }
    }
}
