//! The text of `/metrics`: built on a thread that may block, by one at a time, and at most once a second
//! for all clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::running_totals::RunningTotals;
use super::snapshot::Snapshot;
use super::text::{Format, classic};
use crate::admin::StatusView;

/// For how long a text is reused.
const FRESH: Duration = Duration::from_secs(1);
/// How long it may take: Prometheus waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(8);

/// Why there is no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TextError {
    /// The driver or a file system does not answer in time.
    #[error("the driver or the file system does not answer in time")]
    Late,
    /// A bug, which has been reported.
    #[error("the text could not be made")]
    Broken,
}

#[derive(Debug)]
pub(super) struct TextCache {
    view: Arc<StatusView>,
    /// Whose threads may block.
    main: Handle,
    /// What was counted so far. Only the thread that builds the text takes it.
    running_totals: Arc<std::sync::Mutex<RunningTotals>>,
    made: Mutex<Option<Made>>,
    /// The text is being built, perhaps without a client that still waits.
    busy: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Made {
    at: Instant,
    open: Bytes,
    classic: Option<Bytes>,
}

impl TextCache {
    /// Of a plugin that starts now.
    pub fn new(view: Arc<StatusView>, main: Handle) -> Self {
        TextCache {
            view,
            main,
            running_totals: Arc::new(std::sync::Mutex::new(RunningTotals::new(Instant::now()))),
            made: Mutex::default(),
            busy: Arc::default(),
        }
    }

    /// The text, not older than a second.
    pub async fn get(self: &Arc<Self>, format: Format) -> Result<Bytes, TextError> {
        let mut made = self.made.lock().await;
        let text = match made.take().filter(|made| made.at.elapsed() < FRESH) {
            Some(fresh) => made.insert(fresh),
            None => {
                let open = tokio::time::timeout(PATIENCE, self.make());
                let open = open.await.map_err(|_| TextError::Late)??;
                tokio::spawn(Arc::clone(self).forget());
                made.insert(Made { at: Instant::now(), open: open.into(), classic: None })
            }
        };
        if format == Format::Open {
            return Ok(text.open.clone());
        }
        if text.classic.is_none() {
            let open = text.open.clone();
            let work = move || classic(std::str::from_utf8(&open).unwrap_or_default());
            let made = self.main.spawn_blocking(work).await.map_err(|_| TextError::Broken)?;
            text.classic = Some(made.into());
        }
        text.classic.clone().ok_or(TextError::Broken)
    }

    /// Frees a text that is too old to be reused: it may be large.
    async fn forget(self: Arc<Self>) {
        tokio::time::sleep(FRESH).await;
        let mut made = self.made.lock().await;
        *made = made.take().filter(|made| made.at.elapsed() < FRESH);
    }

    async fn make(&self) -> Result<String, TextError> {
        // Else each scrape would take one more of the few threads that kubelet's calls need too.
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(TextError::Late);
        }
        let done = Done(Arc::clone(&self.busy));
        let (view, running_totals) = (Arc::clone(&self.view), Arc::clone(&self.running_totals));
        let making = self.main.spawn_blocking(move || {
            let _done = done;
            let mut running_totals =
                running_totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            Snapshot::collect(&view, &mut running_totals).text()
        });
        making.await.ok().flatten().ok_or(TextError::Broken)
    }
}

/// Says that it is no longer made.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
