//! The text of `/metrics`: built on a thread that may block, by one at a time, and at most once a second
//! for all clients, in OpenMetrics' format or Prometheus' older one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::running_totals::RunningTotals;
use super::snapshot::Snapshot;
use crate::admin::StatusView;

/// For how long a text is reused.
const FRESH: Duration = Duration::from_secs(1);
/// How long it may take: Prometheus waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(8);

/// The driver or a file system does not answer in time, so there is no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver or the file system does not answer in time")]
pub(super) struct Late;

#[derive(Debug)]
pub(super) struct TextCache {
    view: Arc<StatusView>,
    /// Whose threads may block.
    main: Handle,
    /// What was counted so far. Only the thread that builds the text takes it.
    running_totals: Arc<std::sync::Mutex<RunningTotals>>,
    /// In each format, and when it was made.
    made: Mutex<Option<(Instant, [Bytes; 2])>>,
    /// A text is being built, perhaps without a client that still waits.
    busy: Arc<AtomicBool>,
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
    pub async fn get(self: &Arc<Self>, format: Format) -> Result<Bytes, Late> {
        let mut made = self.made.lock().await;
        if let Some((at, texts)) = &*made
            && at.elapsed() < FRESH
        {
            return Ok(texts[format as usize].clone());
        }
        let texts = tokio::time::timeout(PATIENCE, self.make()).await.map_err(|_| Late)??;
        let text = texts[format as usize].clone();
        *made = Some((Instant::now(), texts));
        tokio::spawn(Arc::clone(self).forget());
        Ok(text)
    }

    /// Frees a text that is too old to be reused: it may be large.
    async fn forget(self: Arc<Self>) {
        tokio::time::sleep(FRESH).await;
        self.made.lock().await.take_if(|(at, _)| at.elapsed() >= FRESH);
    }

    async fn make(&self) -> Result<[Bytes; 2], Late> {
        // Else each scrape would take one more of the few threads that kubelet's calls need too.
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(Late);
        }
        let done = Done(Arc::clone(&self.busy));
        let (view, running_totals) = (Arc::clone(&self.view), Arc::clone(&self.running_totals));
        let making = self.main.spawn_blocking(move || {
            let _done = done;
            let mut running_totals =
                running_totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            Snapshot::collect(&view, &mut running_totals).texts().map(Bytes::from)
        });
        // It panicked, or the plugin ends.
        making.await.map_err(|_| Late)
    }
}

/// Says that it is no longer made.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics 1.0.
    Open,
    /// Prometheus' 0.0.4, which every tool reads.
    Classic,
}

impl Format {
    /// What to call it in the answer.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The one that an `Accept` header prefers; the older one where it does not say (RFC 9110, 12.5.1).
    pub fn wanted(accept: Option<&str>) -> Self {
        let (mut open, mut classic) = (0.0, 0.0);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut weight, mut known) = (1.0, true);
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key.trim() {
                    "q" => weight = value.trim().parse().unwrap_or(0.0),
                    "version" => known = matches!(value.trim(), "1.0.0" | "0.0.1" | "0.0.4"),
                    _ => {}
                }
            }
            let best = match name.as_str() {
                "application/openmetrics-text" if known => &mut open,
                "text/plain" if known => &mut classic,
                _ => continue,
            };
            *best = f64::max(*best, weight);
        }
        if open > 0.0 && open >= classic { Format::Open } else { Format::Classic }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_the_format_that_it_prefers() {
        use Format::{Classic, Open};
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, want) in [
            (Some(prometheus), Open),
            (Some("application/openmetrics-text"), Open),
            (Some("Application/OpenMetrics-Text; version=1.0.0"), Open),
            (Some("application/openmetrics-text; version=2.0.0"), Classic),
            (Some("application/openmetrics-text;q=0"), Classic),
            (Some("application/openmetrics-text;q=0.1, text/plain"), Classic),
            (Some("application/openmetrics-text;q=nonsense, text/plain;q=0.1"), Classic),
            (Some("*/*"), Classic),
            (Some("text/html, ;;=,q=1"), Classic),
            (Some(""), Classic),
            (None, Classic),
        ] {
            assert_eq!(Format::wanted(accept), want, "{accept:?}");
        }
    }
}
