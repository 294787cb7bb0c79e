//! What the agent's jobs publish for views: conditions by topic, what is amiss with single subjects, what happened,
//! and the source of knowledge about other plugins. One writer per topic; readers copy what they show. The board writes
//! the log, too, when a text is new: no job says anything twice.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tessera_gpu::SilentGpu;
use tessera_model::clock::unix_ms;
use tessera_model::holding::Census;
use tessera_system::locks::lock;
use tessera_view::status::Dra;
pub use tessera_view::status::Refusal;
use tessera_view::warning::{GRAVE, Warning};
use tracing::{info, warn};

use crate::allocations::mend::REMOVED;

const MOST_NOTES: usize = 64;

const MOST_REFUSALS: usize = 64;
const MOST_PODS: usize = 16;

fn warning(refusal: &Refusal) -> Warning {
    Warning {
        text: format!("{} cannot start: {}", refusal.who(), refusal.reason),
        since_unix_ms: refusal.since_unix_ms,
        last_unix_ms: refusal.last_unix_ms,
        times: refusal.times,
    }
}

/// By subject and kind: the text, and since when. A condition of the plugin itself has no subject.
type Standing = BTreeMap<(String, &'static str), (String, i64)>;

#[derive(Debug, Default)]
pub struct StatusBoard {
    /// What the plugin waits for, or lacks, and what is amiss with an allocation, a shim or a directory. Only the former
    /// keeps the plugin from being ready.
    standing: Mutex<Standing>,
    /// What went wrong since the start; a text once.
    notes: Mutex<Vec<Warning>>,
    /// Pods that were refused, and not granted since; the newest last.
    refused: Mutex<Vec<Refusal>>,
    facts: Mutex<Facts>,
}

#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// How it is found out what other plugins sell; empty where nobody looks.
    pub others_seen_by: &'static str,
    pub dra: Option<Dra>,
    /// GPUs that are left out because they do not answer, and since when, Unix milliseconds.
    pub silent: Vec<(SilentGpu, i64)>,
    /// Whether the history could last be stored; `None` where it is off, or before the first time.
    pub history_writing: Option<bool>,
}

impl StatusBoard {
    /// Sets the problem of a topic, or with `None` clears it. A topic that has a problem has it since then, however its
    /// text changes.
    pub fn set_condition(&self, topic: &'static str, text: Option<String>) {
        match text {
            Some(text) => self.stand("", topic, text),
            None => self.lift("", topic),
        }
    }

    pub fn conditions(&self) -> Vec<String> {
        let standing = lock(&self.standing);
        let conditions = standing.iter().filter(|((subject, _), _)| subject.is_empty());
        conditions.map(|(_, (text, _))| text.clone()).collect()
    }

    /// The problems with their ages, in the order of topics, then those of single subjects, then what was noted and is
    /// no older than [`GRAVE`].
    pub fn warnings(&self, now_unix_ms: i64) -> Vec<Warning> {
        // A clock that was set back makes nothing younger than it is, and nothing stay.
        let standing = |(text, since): &(String, i64)| Warning {
            text: text.clone(),
            since_unix_ms: (*since).min(now_unix_ms),
            ..Warning::default()
        };
        let mut warnings: Vec<Warning> = lock(&self.standing).values().map(standing).collect();
        let mut notes = lock(&self.notes);
        for note in notes.iter_mut() {
            note.since_unix_ms = note.since_unix_ms.min(now_unix_ms);
            note.last_unix_ms = note.last_unix_ms.min(now_unix_ms);
        }
        notes.retain(|note| now_unix_ms.saturating_sub(note.last_unix_ms) < GRAVE);
        warnings.extend(notes.iter().cloned());
        warnings.extend(self.refused(now_unix_ms).iter().map(warning));
        warnings
    }

    /// Notes that pods were refused. Of a subject there is one note, with the last reason; where there are too many,
    /// the oldest goes.
    pub fn refuse(&self, refused: Refusal) {
        self.refuse_at(refused, unix_ms());
    }

    fn refuse_at(&self, mut refused: Refusal, now: i64) {
        refused.pods.truncate(MOST_PODS);
        let mut all = lock(&self.refused);
        let before = all.iter().position(|one| one.subject == refused.subject);
        let before = before.map(|at| all.remove(at));
        if let Some(before) = before.as_ref().filter(|_| refused.pods.is_empty()) {
            // The API server may be away by now.
            refused.pods.clone_from(&before.pods);
        }
        let (since_unix_ms, times) = before.map_or((now, 0), |one| (one.since_unix_ms, one.times));
        if all.len() >= MOST_REFUSALS {
            all.remove(0);
        }
        all.push(Refusal { since_unix_ms, last_unix_ms: now, times: times + 1, ..refused });
    }

    /// Forgets the refusal of a subject, which was granted or has ended.
    pub fn grant(&self, subject: &str) {
        lock(&self.refused).retain(|one| one.subject != subject);
    }

    /// Forgets refused pods that kubelet knows no more. A claim's refusal ends when the claim does.
    pub fn forget_refused(&self, kubelet: &Census) {
        let ago = i64::try_from(kubelet.asked.elapsed().as_millis()).unwrap_or(i64::MAX);
        let asked_unix_ms = unix_ms().saturating_sub(ago);
        let is_there = |one: &Refusal| {
            let mut holdings = kubelet.holdings.iter();
            holdings.any(|held| held.namespace == one.namespace && one.pods.contains(&held.pod))
        };
        lock(&self.refused).retain(|one| {
            let is_younger = kubelet.pods == 0 || one.last_unix_ms >= asked_unix_ms;
            !one.claim.is_empty() || is_younger || is_there(one)
        });
    }

    /// Pods that were refused, no longer ago than [`GRAVE`].
    pub fn refused(&self, now_unix_ms: i64) -> Vec<Refusal> {
        let mut all = lock(&self.refused);
        for one in all.iter_mut() {
            one.since_unix_ms = one.since_unix_ms.min(now_unix_ms);
            one.last_unix_ms = one.last_unix_ms.min(now_unix_ms);
        }
        all.retain(|one| now_unix_ms.saturating_sub(one.last_unix_ms) < GRAVE);
        all.clone()
    }

    /// Says that something is amiss with a subject for as long as nobody says otherwise: until
    /// [`StatusBoard::lift`], or until the subject is no more ([`StatusBoard::forget`]). What already stands keeps
    /// its age.
    pub fn stand(&self, subject: &str, kind: &'static str, text: String) {
        self.stand_at(subject, kind, text, unix_ms());
    }

    fn stand_at(&self, subject: &str, kind: &'static str, text: String, now: i64) {
        let mut standing = lock(&self.standing);
        let stood = standing.entry((subject.to_owned(), kind)).or_insert((String::new(), now));
        if stood.0 != text {
            warn!("{text}");
            stood.0 = text;
        }
    }

    /// Directories that were removed although this process has them mounted: until the pod is another, nothing that
    /// needs them can start.
    pub fn removed(&self) -> Vec<String> {
        let standing = lock(&self.standing);
        let removed = standing.iter().filter(|((_, kind), _)| *kind == REMOVED);
        removed.map(|(_, (text, _))| text.clone()).collect()
    }

    pub fn lift(&self, subject: &str, kind: &'static str) {
        let mut standing = lock(&self.standing);
        // Nearly always nothing stands, and then nothing is copied.
        if !standing.is_empty()
            && let Some((text, _)) = standing.remove(&(subject.to_owned(), kind))
        {
            info!("no longer: {text}");
        }
    }

    /// [`StatusBoard::stand`] or [`StatusBoard::lift`], by how something ended.
    pub(crate) fn keep<T, E>(
        &self,
        subject: &str,
        kind: &'static str,
        ended: &Result<T, E>,
        text: impl FnOnce(&E) -> String,
    ) {
        match ended {
            Ok(_) => self.lift(subject, kind),
            Err(error) => self.stand(subject, kind, text(error)),
        }
    }

    /// Adds something that happened to what `status` warns of; what was noted already is counted.
    pub fn note(&self, text: String) {
        warn!("{text}");
        self.note_at(text, unix_ms());
    }

    fn note_at(&self, text: String, now: i64) {
        let mut notes = lock(&self.notes);
        if let Some(note) = notes.iter_mut().find(|note| note.text == text) {
            note.times = note.times.saturating_add(1);
            note.last_unix_ms = now;
        } else if notes.len() < MOST_NOTES {
            notes.push(Warning { text, since_unix_ms: now, last_unix_ms: now, times: 1 });
        }
    }

    /// Drops what was said about something that is no more, by its name.
    pub(crate) fn forget(&self, name: &str) {
        lock(&self.standing).retain(|(subject, _), _| subject != name);
        lock(&self.notes).retain(|note| !note.text.contains(name));
    }

    pub fn facts(&self) -> Facts {
        lock(&self.facts).clone()
    }

    pub fn publish(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut lock(&self.facts));
    }

    /// Says which GPUs are left out because they do not answer. One that was has been so since then, whatever it
    /// says now.
    pub fn set_silent(&self, silent: Vec<SilentGpu>) {
        let mut facts = lock(&self.facts);
        let since = |gpu: &SilentGpu| {
            let same = facts.silent.iter().find(|(known, _)| known.is(&gpu.gpu));
            same.map_or_else(unix_ms, |(_, since)| *since)
        };
        facts.silent = silent.into_iter().map(|gpu| (gpu.clone(), since(&gpu))).collect();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use std::time::Instant;

    use tessera_model::holding::Holding;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Stand(u8),
        Lift(u8),
        Note(u8),
        Forget(u8),
        Wait(i64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0u8..4).prop_map(Step::Stand),
            (0u8..4).prop_map(Step::Lift),
            (0u8..4).prop_map(Step::Note),
            (0u8..4).prop_map(Step::Forget),
            (0i64..2 * GRAVE).prop_map(Step::Wait),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        #[test]
        fn what_stands_stays_until_it_is_over_and_what_happened_ages(steps in steps()) {
            let board = StatusBoard::default();
            let (mut now, mut standing) = (1_000, BTreeSet::new());
            let mut noted = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Stand(n) => {
                        board.stand_at(&format!("s{n}"), "kind", format!("s{n}: at {now}"), now);
                        standing.insert(n);
                    }
                    Step::Lift(n) => {
                        board.lift(&format!("s{n}"), "kind");
                        standing.remove(&n);
                    }
                    Step::Note(n) => {
                        board.note_at(format!("n{n}: happened"), now);
                        noted.insert(n, now);
                    }
                    Step::Forget(n) => {
                        board.forget(&format!("s{n}"));
                        standing.remove(&n);
                    }
                    Step::Wait(ms) => now += ms,
                }
                let warnings = board.warnings(now);
                let stands: BTreeSet<u8> =
                    warnings.iter().filter(|one| one.times == 0).map(|one| one.text.as_bytes()[1] - b'0').collect();
                prop_assert_eq!(&stands, &standing);
                noted.retain(|_, at| now - *at < GRAVE);
                let happened: BTreeSet<u8> =
                    warnings.iter().filter(|one| one.times > 0).map(|one| one.text.as_bytes()[1] - b'0').collect();
                prop_assert_eq!(happened, noted.keys().copied().collect());
            }
        }
    }

    #[test]
    fn refusals_are_one_for_each_subject_bounded_and_end() {
        let board = StatusBoard::default();
        let refused = |n: usize, reason: &str| Refusal {
            subject: n.to_string(),
            namespace: "team".into(),
            pods: vec![format!("chat-{n}")],
            reason: reason.into(),
            ..Refusal::default()
        };
        board.refuse_at(refused(0, "no room"), 10);
        board.refuse_at(Refusal { pods: Vec::new(), ..refused(0, "no time") }, 20);
        let [one] = board.refused(20).try_into().unwrap();
        assert_eq!((one.since_unix_ms, one.last_unix_ms, one.times), (10, 20, 2));
        let [warning] = board.warnings(20).try_into().unwrap();
        assert_eq!(warning.text, "team/chat-0 cannot start: no time");
        board.grant("0");
        assert!(board.refused(20).is_empty());
        (0..2 * MOST_REFUSALS).for_each(|n| board.refuse_at(refused(n, "no room"), 30));
        let all = board.refused(30);
        assert_eq!((all.len(), all[0].subject.as_str()), (MOST_REFUSALS, "64"));
        assert!(board.warnings(30 + GRAVE).is_empty());
    }

    #[test]
    fn a_refused_pod_is_forgotten_when_kubelet_knows_it_no_more() {
        let board = StatusBoard::default();
        let refused = |claim: &str, pod: &str| Refusal {
            subject: format!("{claim}{pod}"),
            namespace: "team".into(),
            pods: vec![pod.into()],
            claim: claim.into(),
            ..Refusal::default()
        };
        for (claim, pod) in [("", "stays"), ("", "gone"), ("claim", "gone")] {
            board.refuse_at(refused(claim, pod), 10);
        }
        let holding = Holding {
            namespace: "team".into(),
            pod: "stays".into(),
            container: "c".into(),
            resource_name: "r".into(),
            device_ids: Vec::new(),
        };
        let holdings = vec![holding];
        let left = |pods, holdings| {
            board.forget_refused(&Census { pods, holdings, asked: Instant::now() });
            board.refused(20).into_iter().map(|one| one.subject).collect::<Vec<_>>()
        };
        assert_eq!(left(0, Vec::new()).len(), 3, "kubelet has just started");
        assert_eq!(left(1, holdings.clone()), ["stays", "claimgone"]);
        board.refuse_at(refused("", "new"), i64::MAX);
        assert_eq!(left(1, holdings).len(), 3, "it came after kubelet was asked");
    }

    #[test]
    fn a_problem_keeps_its_age_while_its_text_changes_and_a_note_ends() {
        let board = StatusBoard::default();
        board.set_condition("gpus", Some("none".into()));
        board.note("ledger: damaged".into());
        board.note("ledger: damaged".into());
        let [before, note] = board.warnings(unix_ms()).try_into().unwrap();
        board.set_condition("gpus", Some("none at all".into()));
        assert_eq!(board.conditions(), ["none at all"]);
        let [after, _] = board.warnings(unix_ms()).try_into().unwrap();
        assert_eq!(
            (after.text.as_str(), after.since_unix_ms),
            ("none at all", before.since_unix_ms)
        );
        assert_eq!((note.times, note.since_unix_ms <= note.last_unix_ms), (2, true));
        assert_eq!(board.warnings(note.last_unix_ms + GRAVE).len(), 1, "what stands does not end");
        board.set_condition("gpus", None);
        assert!(board.conditions().is_empty());
    }
}
