//! Asking the plugin, on a thread of its own: a plugin that hangs must not hang the view.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tessera_kubelet::admin::StatusResponse;
use tokio::signal::unix::{SignalKind, signal};

use super::model::Model;
use crate::admin;
use crate::node::unix_ms;

/// What comes in.
pub(super) enum News {
    /// The plugin's answer, and when it came.
    Answer(Box<StatusResponse>, Duration),
    /// It does not answer, and why.
    Silence(String),
    /// The process was told to end.
    End,
}

/// The thread's other end.
pub(super) struct Feed {
    news: Receiver<News>,
}

impl Feed {
    /// Starts asking at `socket`, once in `interval`.
    pub fn start(socket: PathBuf, interval: Duration) -> anyhow::Result<Self> {
        let (sender, news) = channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("feed".into()).spawn(move || {
            runtime.block_on(async {
                let asking = ask(socket, interval, sender.clone());
                tokio::select! {
                    () = asking => {}
                    () = told_to_end() => drop(sender.send(News::End)),
                }
            });
        })?;
        Ok(Feed { news })
    }

    /// What comes within `wait`.
    pub fn next(&self, wait: Duration) -> Option<News> {
        match self.news.recv_timeout(wait) {
            Ok(news) => Some(news),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(News::End),
        }
    }
}

/// Takes the news over into the model.
pub(super) fn apply(model: &mut Model, news: News) {
    match news {
        News::Answer(status, at) => model.take(*status, at),
        News::Silence(reason) => model.miss(reason, unix_ms()),
        News::End => model.quit = true,
    }
}

async fn ask(socket: PathBuf, interval: Duration, sender: Sender<News>) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let news = match admin::ask(&socket).await {
            Ok(status) => News::Answer(Box::new(status), began.elapsed()),
            Err(error) => News::Silence(format!("{error:#}")),
        };
        if sender.send(news).is_err() {
            return;
        }
    }
}

async fn told_to_end() {
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
        SignalKind::quit(),
    ];
    let mut signals: Vec<_> = kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect();
    std::future::poll_fn(|cx| {
        match signals.iter_mut().any(|signal| signal.poll_recv(cx).is_ready()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}
