//! The audit trail's lines: what happened to an allocation, a GPU or the node, why, and who did it.
//!
//! Lines are JSON. Older ones lack fields that came later, which then have their defaults; one that a
//! newer version wrote and this one does not know is left out when the trail is read.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Grant, Holder, Record};
use crate::allocate::AllocationId;
use crate::config::Compute;
use crate::device::health;

/// Longest text in a line, bytes. What is longer is cut.
pub const TEXT_KEPT: usize = 1024;

/// Limits on one GPU, as the trail tells them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The GPU.
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_limit_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
    /// What that share means.
    pub compute: Compute,
}

impl From<&Grant> for Limits {
    fn from(grant: &Grant) -> Self {
        Limits {
            uuid: grant.uuid.clone(),
            memory_limit_bytes: grant.memory_limit_bytes,
            cores_millis: grant.cores_millis,
            compute: grant.compute,
        }
    }
}

/// What happened. Those that [`What::is_tenants`] a container can cause itself; what they say of it is
/// the container's word or was seen from outside, and they have room of their own in the trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Kubelet allocated it.
    Allocated,
    /// Kubelet allocated it while a process of the generation before still used its pages.
    PagesKept,
    /// A container started with it.
    Started,
    /// Its replicas went to another allocation.
    Parked,
    /// Kubelet no longer knows it and nothing uses its pages.
    Released,
    /// Found on disk without a record.
    Adopted,
    /// A process of it holds device memory outside its account.
    Unaccounted,
    /// Another plugin sells a GPU of ours, too.
    SoldByOthers,
    /// Nobody else sells it any more.
    SoldAlone,
    /// A GPU's health went from one state to another.
    Health {
        /// Before.
        from: health::State,
        /// After.
        to: health::State,
    },
    /// Somebody changed its limits while it ran.
    QuotaSet {
        /// Limits before, per GPU.
        before: Vec<Limits>,
        /// Limits after, per GPU.
        after: Vec<Limits>,
        /// Below what was in use, which was asked for.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        forced: bool,
    },
    /// Somebody gave it back the limits that it was allocated with.
    QuotaReset {
        /// Limits before, per GPU.
        before: Vec<Limits>,
        /// Limits after, per GPU.
        after: Vec<Limits>,
    },
    /// Nothing more of a GPU is given out until it is uncordoned.
    Cordoned,
    /// It is given out again.
    Uncordoned,
    /// Another configuration is in force.
    ConfigurationReloaded {
        /// What it changes, a sentence each.
        changes: Vec<String>,
    },
    /// A new configuration was refused; the one before stays in force.
    ConfigurationRefused {
        /// What is wrong with it, `file:line: key: …` each.
        problems: Vec<String>,
    },
    /// A request for device memory was refused because of the quota.
    RefusedMemory {
        /// Bytes asked for, of the largest request that is known; 0 where none is.
        #[serde(default)]
        bytes: u64,
        /// Bytes charged at that time.
        #[serde(default)]
        charged_bytes: u64,
        /// The limit at that time, bytes.
        #[serde(default)]
        limit_bytes: u64,
    },
    /// It waited long for its part of GPU time.
    Delayed {
        /// How long in all, milliseconds.
        waited_ms: u64,
        /// Within how long, milliseconds; 0 where that is not known.
        #[serde(default)]
        within_ms: u64,
    },
    /// The driver refused memory that the quota allowed.
    DriverRefused,
    /// It drained a GPU too late, so that others ran beside it.
    Overlapped,
    /// A process of it kept to its part of GPU time by itself, because the arbiter was silent.
    Rationed,
    /// A process of it found no free slot, or saw a GPU that it was not given.
    Unlisted,
    /// Something that holds it to its quota was changed or is missing.
    Tampered {
        /// What.
        what: String,
    },
    /// A process of it uses the GPU past the shim, or a process that nobody can explain does.
    Bypassed {
        /// Its pid on the host; 0 where unknown.
        #[serde(default)]
        pid: u32,
        /// Device memory that it holds, bytes.
        #[serde(default)]
        bytes: u64,
    },
}

impl What {
    /// Its name, as in the JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            What::Allocated => "allocated",
            What::PagesKept => "pages-kept",
            What::Started => "started",
            What::Parked => "parked",
            What::Released => "released",
            What::Adopted => "adopted",
            What::Unaccounted => "unaccounted",
            What::SoldByOthers => "sold-by-others",
            What::SoldAlone => "sold-alone",
            What::Health { .. } => "health",
            What::QuotaSet { .. } => "quota-set",
            What::QuotaReset { .. } => "quota-reset",
            What::Cordoned => "cordoned",
            What::Uncordoned => "uncordoned",
            What::ConfigurationReloaded { .. } => "configuration-reloaded",
            What::ConfigurationRefused { .. } => "configuration-refused",
            What::RefusedMemory { .. } => "refused-memory",
            What::Delayed { .. } => "delayed",
            What::DriverRefused => "driver-refused",
            What::Overlapped => "overlapped",
            What::Rationed => "rationed",
            What::Unlisted => "unlisted",
            What::Tampered { .. } => "tampered",
            What::Bypassed { .. } => "bypassed",
        }
    }

    /// Whether a container can cause it, as often as it likes.
    #[must_use]
    pub fn is_tenants(&self) -> bool {
        matches!(
            self,
            What::Started
                | What::Unaccounted
                | What::RefusedMemory { .. }
                | What::Delayed { .. }
                | What::DriverRefused
                | What::Overlapped
                | What::Rationed
                | What::Unlisted
                | What::Tampered { .. }
                | What::Bypassed { .. }
        )
    }

    /// Who does such a thing, where nobody else is named.
    fn usually_by(&self) -> By {
        match self {
            What::Allocated | What::PagesKept | What::Started | What::Parked => By::Kubelet,
            What::Health { .. } => By::Driver,
            What::ConfigurationReloaded { .. } | What::ConfigurationRefused { .. } => {
                By::Configuration
            }
            what if what.is_tenants() => By::Tenant,
            _ => By::Plugin,
        }
    }

    /// Of two in a row: the later one, with what has to be added up or compared.
    fn after(self, before: &What) -> What {
        match (before, self) {
            (
                What::RefusedMemory { bytes: before, .. },
                What::RefusedMemory { bytes, charged_bytes, limit_bytes },
            ) => What::RefusedMemory { bytes: bytes.max(*before), charged_bytes, limit_bytes },
            (
                What::Delayed { waited_ms: waited, within_ms: within },
                What::Delayed { waited_ms, within_ms },
            ) => What::Delayed {
                waited_ms: waited_ms.saturating_add(*waited),
                within_ms: within_ms.saturating_add(*within),
            },
            (_, what) => what,
        }
    }
}

/// Who did it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Kubelet asked for it.
    Kubelet,
    /// The configuration file.
    Configuration,
    /// The plugin, on its own.
    Plugin,
    /// What the driver said.
    Driver,
    /// A process of the container.
    Tenant,
    /// Somebody, over the admin socket.
    Admin {
        /// Its user, by the socket's peer credentials.
        uid: u32,
        /// Its pid on the host, likewise; 0 where that is in a pid namespace that is not seen from here.
        #[serde(default)]
        pid: u32,
        /// The user who logged in, whatever became of the uid since (`/proc/<pid>/loginuid`); absent for
        /// what no login started.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        login_uid: Option<u32>,
        /// What was asked for, as a command.
        command: String,
    },
}

impl By {
    /// Who, without what was asked for.
    #[must_use]
    pub fn who(&self) -> String {
        match self {
            By::Kubelet => "kubelet".to_owned(),
            By::Configuration => "configuration".to_owned(),
            By::Plugin => "plugin".to_owned(),
            By::Driver => "driver".to_owned(),
            By::Tenant => "container".to_owned(),
            By::Admin { uid, login_uid: Some(login), .. } if login != uid => {
                format!("uid {uid} (logged in as {login})")
            }
            By::Admin { uid, .. } => format!("uid {uid}"),
        }
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.who())?;
        let By::Admin { pid, command, .. } = self else { return Ok(()) };
        if *pid != 0 {
            write!(f, " pid {pid}")?;
        }
        write!(f, ": {command}")
    }
}

/// One line of the trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, Unix milliseconds. By the clock of that time; the order of lines does not depend on it.
    pub at_unix_ms: i64,
    /// Which allocation; none where it concerns a GPU or the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<AllocationId>,
    /// Which Allocate of it.
    #[serde(default)]
    pub generation: u64,
    /// What.
    pub what: What,
    /// On which GPU, where it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Who held the allocation, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// Who did it; none in lines of versions that did not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<By>,
    /// How often since the line before of its kind, where such lines are drawn together.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u64,
}

fn once() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_once(times: &u64) -> bool {
    *times == 1
}

impl Event {
    /// What happened to the node, at a Unix time in milliseconds, by whom it usually is.
    #[must_use]
    pub fn of_node(what: What, at_unix_ms: i64) -> Self {
        let by = Some(what.usually_by());
        Event {
            at_unix_ms,
            id: None,
            generation: 0,
            what,
            gpu: None,
            reason: None,
            holder: None,
            by,
            times: 1,
        }
    }

    /// What happened to a GPU.
    #[must_use]
    pub fn of_gpu(uuid: &str, what: What, reason: String, at_unix_ms: i64) -> Self {
        Event::of_node(what, at_unix_ms).on_gpu(uuid).because(reason)
    }

    /// What happened to an allocation.
    #[must_use]
    pub fn of(record: &Record, what: What, at_unix_ms: i64) -> Self {
        Event {
            id: Some(record.id.clone()),
            generation: record.generation,
            holder: record.holder.clone(),
            ..Event::of_node(what, at_unix_ms)
        }
    }

    /// Names who did it.
    #[must_use]
    pub fn by(self, by: By) -> Self {
        Event { by: Some(by), ..self }
    }

    /// Says why.
    #[must_use]
    pub fn because(self, reason: impl Into<String>) -> Self {
        Event { reason: Some(reason.into()), ..self }
    }

    /// Says on which GPU.
    #[must_use]
    pub fn on_gpu(self, uuid: &str) -> Self {
        Event { gpu: Some(uuid.to_owned()), ..self }
    }

    /// Says how often.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Event { times, ..self }
    }

    /// This one after another of its kind that was not written yet, as one line.
    #[must_use]
    pub(crate) fn after(self, before: &Event) -> Self {
        let times = self.times.saturating_add(before.times);
        let reason = self.reason.clone().or_else(|| before.reason.clone());
        let what = self.what.clone().after(&before.what);
        Event { what, times, reason, ..self }
    }

    /// With no text longer than [`TEXT_KEPT`]: a line's size is bounded, whoever wrote the text.
    #[must_use]
    pub(crate) fn bounded(mut self) -> Self {
        self.reason.iter_mut().for_each(cut);
        if let Some(By::Admin { command, .. }) = &mut self.by {
            cut(command);
        }
        match &mut self.what {
            What::ConfigurationReloaded { changes: texts }
            | What::ConfigurationRefused { problems: texts } => {
                texts.truncate(16);
                texts.iter_mut().for_each(cut);
            }
            What::Tampered { what } => cut(what),
            _ => {}
        }
        self
    }
}

fn cut(text: &mut String) {
    if text.len() > TEXT_KEPT {
        let end = (0..=TEXT_KEPT - '…'.len_utf8()).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_versions_that_knew_less_are_read() {
        let old = r#"{"at_unix_ms":5,"id":"0123456789abcdef0123456789abcdef","generation":3,"what":"started"}"#;
        let event: Event = serde_json::from_str(old).unwrap();
        assert_eq!((event.what, event.by, event.times), (What::Started, None, 1));
        let old = r#"{"at_unix_ms":5,"what":{"health":{"from":"healthy","to":"unhealthy"}},"gpu":"GPU-a","reason":"XID 79"}"#;
        let event: Event = serde_json::from_str(old).unwrap();
        assert_eq!((event.gpu.as_deref(), event.what.name()), (Some("GPU-a"), "health"));
    }

    #[test]
    fn each_kind_has_the_name_that_its_line_has() {
        let limits = Vec::new;
        let (before, after, forced) = (limits(), limits(), false);
        for what in [
            What::Allocated,
            What::QuotaSet { before: limits(), after: limits(), forced },
            What::QuotaReset { before, after },
            What::Cordoned,
            What::Uncordoned,
            What::ConfigurationReloaded { changes: Vec::new() },
            What::ConfigurationRefused { problems: Vec::new() },
            What::RefusedMemory { bytes: 1, charged_bytes: 2, limit_bytes: 3 },
            What::Delayed { waited_ms: 1, within_ms: 2 },
            What::DriverRefused,
            What::Overlapped,
            What::Rationed,
            What::Unlisted,
            What::Tampered { what: "usage page".into() },
            What::Bypassed { pid: 1, bytes: 2 },
        ] {
            let json = serde_json::to_value(&what).unwrap();
            let name = json.as_str().or_else(|| Some(json.as_object()?.keys().next()?));
            assert_eq!(name, Some(what.name()));
            assert_eq!(serde_json::from_value::<What>(json).unwrap(), what);
        }
    }

    #[test]
    fn what_is_drawn_together_is_added_up() {
        let refused = |bytes, times| {
            let what = What::RefusedMemory { bytes, charged_bytes: 0, limit_bytes: 9 };
            Event::of_node(what, 0).times(times)
        };
        let both = refused(5, 2).after(&refused(7, 3));
        assert_eq!((both.times, &both.what), (5, &refused(7, 1).what));
        let delayed = |ms| Event::of_node(What::Delayed { waited_ms: ms, within_ms: 10 * ms }, 0);
        let both = delayed(5).after(&delayed(7));
        assert_eq!(both.what, What::Delayed { waited_ms: 12, within_ms: 120 });
    }

    #[test]
    fn a_lines_texts_are_bounded() {
        let long = "ä".repeat(5000);
        let what = What::ConfigurationRefused { problems: vec![long.clone(); 100] };
        let by = By::Admin { uid: 0, pid: 1, login_uid: None, command: long.clone() };
        let event = Event::of_node(what, 0).by(by).because(long).bounded();
        let line = serde_json::to_string(&event).unwrap();
        assert!(line.len() < 20 * TEXT_KEPT, "{}", line.len());
        assert!(event.reason.unwrap().ends_with("ä…"));
    }
}
