//! The plugin's registration state, for probes, `status` and metrics.

use std::time::SystemTime;

use tokio::sync::watch;

/// Where registration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not registered: there is no kubelet, or it refused, or it has restarted.
    Waiting,
    /// Kubelet accepted Register, but has not opened ListAndWatch yet.
    Accepted,
    /// Kubelet reads ListAndWatch: the node offers the resource.
    Live,
    /// The server has stopped.
    Stopped,
}

/// The state of registration and its history since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Where registration is.
    pub phase: Phase,
    /// When kubelet last accepted a Register.
    pub registered_at: Option<SystemTime>,
    /// How often kubelet accepted a Register.
    pub registrations: u64,
    /// The latest failure to register; `None` after a success.
    pub last_error: Option<String>,
}

/// A handle on the current [`Report`]; cheap to clone.
#[derive(Clone, Debug)]
pub struct Readiness(watch::Receiver<Report>);

impl Readiness {
    /// The state now.
    pub fn report(&self) -> Report {
        self.0.borrow().clone()
    }

    /// Waits until `condition` holds, and gives the report it held for. `None` if the server stopped
    /// first.
    pub async fn wait_for(&self, condition: impl FnMut(&Report) -> bool) -> Option<Report> {
        let mut receiver = self.0.clone();
        let report = receiver.wait_for(condition).await.ok()?;
        Some(report.clone())
    }

    /// Waits until the node offers the resource; false if the server stopped first.
    pub async fn wait_live(&self) -> bool {
        self.wait_for(|report| report.phase == Phase::Live).await.is_some()
    }
}

/// The writing end of [`Readiness`].
#[derive(Debug)]
pub(super) struct ReadinessWriter(watch::Sender<Report>);

impl ReadinessWriter {
    pub(super) fn phase(&self, phase: Phase) {
        self.0.send_if_modified(|report| {
            let changed = report.phase != phase;
            report.phase = phase;
            changed
        });
    }

    pub(super) fn registered(&self) {
        self.0.send_modify(|report| {
            report.registered_at = Some(SystemTime::now());
            report.registrations += 1;
            report.last_error = None;
        });
    }

    pub(super) fn failed(&self, error: &str) {
        self.0.send_modify(|report| report.last_error = Some(error.to_owned()));
    }
}

pub(super) fn channel() -> (Readiness, ReadinessWriter) {
    let (sender, receiver) = watch::channel(Report {
        phase: Phase::Waiting,
        registered_at: None,
        registrations: 0,
        last_error: None,
    });
    (Readiness(receiver), ReadinessWriter(sender))
}
