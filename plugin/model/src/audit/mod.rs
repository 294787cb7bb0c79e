//! The audit trail's lines: what happened to an allocation, a GPU or the node, why, and by whom.
//!
//! Lines are JSON. Older ones lack fields that came later, which then have their defaults; one that a
//! newer version wrote and this one does not know is left out when the trail is read.

mod what;

use std::fmt;

use serde::{Deserialize, Serialize};
pub use what::{Behind, Limits, What};

use crate::allocation_id::AllocationId;
use crate::printable;
use crate::record::{Holder, Record};

/// Longest text in a line, bytes. What is longer is cut.
pub const TEXT_KEPT: usize = 1024;

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
    pub what: What,
    /// On which GPU, where it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The holder of the allocation, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// The originator; absent in lines of versions that did not record one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
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

    pub fn of_gpu(uuid: &str, what: What, reason: String, at_unix_ms: i64) -> Self {
        Event::of_node(what, at_unix_ms).on_gpu(uuid).because(reason)
    }

    pub fn of(record: &Record, what: What, at_unix_ms: i64) -> Self {
        Event {
            id: Some(record.id.clone()),
            generation: record.generation,
            holder: record.holder.clone(),
            ..Event::of_node(what, at_unix_ms)
        }
    }

    pub fn by(self, by: Actor) -> Self {
        Event { by: Some(by), ..self }
    }

    pub fn because(self, reason: impl Into<String>) -> Self {
        Event { reason: Some(reason.into()), ..self }
    }

    pub fn on_gpu(self, uuid: &str) -> Self {
        Event { gpu: Some(uuid.to_owned()), ..self }
    }

    pub fn times(self, times: u64) -> Self {
        Event { times, ..self }
    }

    /// Whether the reason is about its own allocation alone: the plugin wrote it, and it names no other.
    pub fn reason_is_own(&self) -> bool {
        self.what.reason_is_own()
    }

    /// This one after another of its kind that was not written yet, as one line.
    pub fn after(self, before: &Event) -> Self {
        let times = self.times.saturating_add(before.times);
        let reason = self.reason.clone().or_else(|| before.reason.clone());
        let what = self.what.clone().after(&before.what);
        Event { what, times, reason, ..self }
    }

    /// With no text longer than [`TEXT_KEPT`]: a line's size is bounded, whatever its source.
    pub fn bounded(mut self) -> Self {
        self.reason.iter_mut().for_each(cut);
        if let Some(Actor::Admin { command, .. }) = &mut self.by {
            cut(command);
        }
        match &mut self.what {
            What::ConfigurationReloaded { changes: texts }
            | What::ConfigurationRefused { problems: texts } => {
                texts.truncate(16);
                texts.iter_mut().for_each(cut);
            }
            What::Tampered { what } | What::Restored { what } => cut(what),
            _ => {}
        }
        self
    }
}

fn cut(text: &mut String) {
    printable::cut(text, TEXT_KEPT);
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actor {
    Kubelet,
    Configuration,
    Plugin,
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
        /// The uid's name, where the plugin's `/etc/passwd` has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
        /// The login uid's name, likewise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        login: Option<String>,
        /// What was asked for, as a command.
        command: String,
    },
}

impl Actor {
    /// The originator, without the command.
    pub fn who(&self) -> String {
        match self {
            Actor::Kubelet => "kubelet".to_owned(),
            Actor::Configuration => "configuration".to_owned(),
            Actor::Plugin => "plugin".to_owned(),
            Actor::Driver => "driver".to_owned(),
            Actor::Tenant => "container".to_owned(),
            Actor::Admin { uid, login_uid, user, login, .. } => {
                let name = |name: &Option<String>, uid: u32| {
                    name.clone().unwrap_or_else(|| format!("uid {uid}"))
                };
                match login_uid.filter(|login| login != uid) {
                    Some(id) => format!("{} (logged in as {})", name(user, *uid), name(login, id)),
                    None => name(user, *uid),
                }
            }
        }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.who())?;
        let Actor::Admin { pid, command, .. } = self else { return Ok(()) };
        if *pid != 0 {
            write!(f, " pid {pid}")?;
        }
        write!(f, ": {command}")
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
        assert_eq!((event.gpu.as_deref(), event.what.into_str()), (Some("GPU-a"), "health"));
    }

    #[test]
    fn what_is_drawn_together_is_added_up() {
        let refused = |bytes, times| {
            let what = What::RefusedMemory { bytes, charged_bytes: 0, limit_bytes: 9 };
            Event::of_node(what, 0).times(times)
        };
        let both = refused(5, 2).after(&refused(7, 3));
        assert_eq!((both.times, &both.what), (5, &refused(7, 1).what));
        let other = Behind::Allocation { id: "x".to_owned(), holder: None };
        let delayed = |ms, behind| {
            Event::of_node(What::Delayed { waited_ms: ms, within_ms: 10 * ms, behind }, 0)
        };
        let both = delayed(5, Behind::Nobody).after(&delayed(7, other));
        let behind = Behind::Nobody;
        assert_eq!(both.what, What::Delayed { waited_ms: 12, within_ms: 120, behind });
    }

    #[test]
    fn a_lines_texts_are_bounded() {
        let long = "ä".repeat(5000);
        let what = What::ConfigurationRefused { problems: vec![long.clone(); 100] };
        let by = Actor::Admin {
            uid: 0,
            pid: 1,
            login_uid: None,
            user: None,
            login: None,
            command: long.clone(),
        };
        let event = Event::of_node(what, 0).by(by).because(long).bounded();
        let line = serde_json::to_string(&event).unwrap();
        assert!(line.len() < 20 * TEXT_KEPT, "{}", line.len());
        assert!(event.reason.unwrap().ends_with("ä…"));
    }

    #[test]
    fn a_caller_is_called_by_name_where_that_is_known() {
        let who = |user: Option<&str>, login_uid, login: Option<&str>| {
            let (user, login) = (user.map(str::to_owned), login.map(str::to_owned));
            let command = String::new();
            Actor::Admin { uid: 0, pid: 1, login_uid, user, login, command }.who()
        };
        assert_eq!(who(None, None, None), "uid 0");
        assert_eq!(who(Some("root"), None, None), "root");
        assert_eq!(who(Some("root"), Some(0), Some("root")), "root");
        assert_eq!(who(Some("root"), Some(1000), None), "root (logged in as uid 1000)");
        assert_eq!(who(Some("root"), Some(1000), Some("alice")), "root (logged in as alice)");
        // As earlier versions wrote it.
        let old: Actor = serde_json::from_str(r#"{"admin":{"uid":7,"command":"x"}}"#).unwrap();
        assert_eq!(old.who(), "uid 7");
    }
}
