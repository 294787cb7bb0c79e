//! The registration state machine: what happened, to what to do next. No time and no I/O in here.
//!
//! ```text
//!             Listen            Register            Accepted            Opened
//!  (start) ──► Listening ──► Registering ──────────► Accepted ─────────► Live
//!      ▲           │ no kubelet   │ Refused             │ Timer            │ Closed, NotOffered
//!      │           ▼              ▼                     ▼                  ▼
//!      │        Waiting        Retry ◄─ Register ─   Backoff ◄─────────────┘
//!      └───────────┴── KubeletAppeared, SocketLost ─────┴── Timer
//! ```
//!
//! Kubelet dials back during Register and opens ListAndWatch right after, so `Opened` may come before
//! `Accepted`. Once a registration has been accepted, every new attempt uses a new socket whose
//! predecessor has been closed before: some kubelets look a dying stream's owner up by resource name
//! and would disconnect the successor (kubernetes #121994, #127803).

use std::time::Duration;

use super::{Phase, Timing};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A new socket listens. `kubelet`: whether `kubelet.sock` was there at that moment.
    Listening {
        kubelet: bool,
    },
    ListenFailed,
    /// `kubelet.sock` is there and is not the one seen before.
    KubeletAppeared,
    KubeletGone,
    /// Our socket is gone from the directory, and kubelet's is there.
    SocketLost,
    Accepted,
    /// Kubelet refused Register, could not be reached, or was too slow; in words.
    Refused(String),
    Opened,
    /// A ListAndWatch stream ended, and not by us.
    Closed,
    /// Kubelet does not offer the resource, although all went well.
    NotOffered,
    /// The time of the last [`Action::Wake`] has come.
    Timer,
}

/// What to do. The actions of one step are done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// End the server with all its streams, listen on a new socket, say `Listening` or
    /// `ListenFailed`. Whatever the old socket's calls say later is void.
    Listen,
    Register,
    /// Say `Timer` after this time; replaces an earlier one. A state that awaits none ignores it.
    Wake(Duration),
    Report(Phase),
    /// Find out whether kubelet offers the resource, and say `NotOffered` if it does not.
    Verify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Starting,
    /// Listening; there is no kubelet.
    Waiting,
    Registering,
    /// Registered; ListAndWatch has not been opened.
    Accepted,
    /// Registered, and kubelet reads ListAndWatch.
    Live,
    /// Before the next attempt on the same socket.
    Retry,
    /// Before the next attempt on a new socket.
    Backoff,
}

#[derive(Debug)]
pub(super) struct Machine {
    state: State,
    timing: Timing,
    kubelet: bool,
    streams: usize,
    failures: u32,
}

impl Machine {
    pub(super) fn new(timing: Timing) -> Self {
        Self { state: State::Starting, timing, kubelet: false, streams: 0, failures: 0 }
    }

    pub(super) fn on(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Listening { kubelet } => self.listening(kubelet),
            Event::ListenFailed => self.back_off(State::Backoff),
            Event::KubeletAppeared => {
                self.kubelet = true;
                self.failures = 0;
                self.listen_again()
            }
            Event::KubeletGone => {
                self.kubelet = false;
                match self.state {
                    // It still reads our stream: only its door is gone.
                    State::Live | State::Starting => vec![],
                    _ => self.wait(),
                }
            }
            Event::SocketLost => self.listen_again(),
            Event::Accepted => match self.state {
                State::Registering if self.streams > 0 => self.live(),
                State::Registering => {
                    self.state = State::Accepted;
                    vec![Action::Report(Phase::Accepted), Action::Wake(self.timing.live_timeout)]
                }
                _ => vec![],
            },
            Event::Refused(_) => match self.state {
                State::Registering => self.back_off(State::Retry),
                _ => vec![],
            },
            Event::Opened => {
                self.streams += 1;
                match self.state {
                    State::Accepted => self.live(),
                    _ => vec![],
                }
            }
            Event::Closed => {
                self.streams = self.streams.saturating_sub(1);
                match self.state {
                    State::Live if self.streams == 0 => self.back_off(State::Backoff),
                    _ => vec![],
                }
            }
            Event::NotOffered => match self.state {
                State::Live => self.back_off(State::Backoff),
                _ => vec![],
            },
            Event::Timer => self.timer(),
        }
    }

    fn listening(&mut self, kubelet: bool) -> Vec<Action> {
        self.streams = 0;
        self.kubelet = kubelet;
        if kubelet { self.register() } else { self.wait() }
    }

    fn register(&mut self) -> Vec<Action> {
        self.state = State::Registering;
        vec![Action::Register]
    }

    fn wait(&mut self) -> Vec<Action> {
        self.state = State::Waiting;
        vec![Action::Report(Phase::Waiting)]
    }

    fn listen_again(&mut self) -> Vec<Action> {
        self.state = State::Starting;
        vec![Action::Report(Phase::Waiting), Action::Listen]
    }

    fn live(&mut self) -> Vec<Action> {
        self.state = State::Live;
        vec![Action::Report(Phase::Live), Action::Wake(self.timing.max_backoff), Action::Verify]
    }

    /// A failure: wait, each time longer. Forgiven after a while of living (see `timer`), so that two
    /// plugins that take one resource from each other do so ever more slowly.
    fn back_off(&mut self, state: State) -> Vec<Action> {
        self.state = state;
        let wait = self
            .timing
            .min_backoff
            .saturating_mul(2_u32.saturating_pow(self.failures))
            .min(self.timing.max_backoff);
        self.failures = self.failures.saturating_add(1);
        vec![Action::Report(Phase::Waiting), Action::Wake(wait)]
    }

    fn timer(&mut self) -> Vec<Action> {
        match self.state {
            // Kubelet may have opened the stream while the socket was being retried.
            State::Retry if self.kubelet => self.register(),
            State::Retry => self.wait(),
            State::Backoff => self.listen_again(),
            State::Accepted => self.back_off(State::Backoff),
            State::Live => {
                self.failures = 0;
                vec![]
            }
            State::Starting | State::Waiting | State::Registering => vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);

    fn new() -> Machine {
        let max_backoff = Duration::from_secs(1);
        Machine::new(Timing { min_backoff: FIRST, max_backoff, ..Timing::default() })
    }

    const LISTENING: Event = Event::Listening { kubelet: true };

    fn live() -> Machine {
        let mut machine = new();
        assert_eq!(machine.on(LISTENING), [Action::Register]);
        assert_eq!(
            machine.on(Event::Accepted),
            [Action::Report(Phase::Accepted), Action::Wake(Duration::from_secs(10))]
        );
        assert!(machine.on(Event::Opened).contains(&Action::Report(Phase::Live)));
        machine
    }

    #[test]
    fn a_stream_opened_before_register_returns_counts() {
        let mut machine = new();
        machine.on(LISTENING);
        assert_eq!(machine.on(Event::Opened), []);
        assert!(machine.on(Event::Accepted).contains(&Action::Report(Phase::Live)));
    }

    #[test]
    fn a_new_kubelet_gets_a_new_socket_in_every_state() {
        let states: [fn() -> Machine; 4] = [
            live,
            || {
                let mut machine = live();
                machine.on(Event::Closed);
                machine
            },
            || {
                let mut machine = new();
                machine.on(LISTENING);
                machine
            },
            || {
                let mut machine = new();
                machine.on(LISTENING);
                machine.on(Event::Refused(String::new()));
                machine
            },
        ];
        for state in states {
            let mut machine = state();
            assert!(machine.on(Event::KubeletAppeared).contains(&Action::Listen), "{machine:?}");
        }
    }

    #[test]
    fn refusals_are_retried_on_the_same_socket_ever_more_slowly() {
        let mut machine = new();
        machine.on(LISTENING);
        let mut waits = vec![];
        for _ in 0..6 {
            for action in machine.on(Event::Refused(String::new())) {
                if let Action::Wake(wait) = action {
                    waits.push(wait.as_millis());
                }
            }
            assert_eq!(machine.on(Event::Timer), [Action::Register]);
        }
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
    }

    #[test]
    fn only_the_last_stream_that_ends_counts() {
        let mut machine = live();
        machine.on(Event::Opened);
        assert_eq!(machine.on(Event::Closed), []);
        assert!(!machine.on(Event::Closed).is_empty());
    }

    #[test]
    fn failures_are_forgiven_only_after_living_for_a_while() {
        let mut machine = live();
        let wait = |actions: Vec<Action>| {
            actions.into_iter().find_map(|action| match action {
                Action::Wake(wait) => Some(wait),
                _ => None,
            })
        };
        assert_eq!(wait(machine.on(Event::Closed)), Some(FIRST));
        for event in [Event::Timer, LISTENING, Event::Accepted, Event::Opened] {
            machine.on(event);
        }
        assert_eq!(wait(machine.on(Event::Closed)), Some(FIRST * 2));
        for event in [Event::Timer, LISTENING, Event::Accepted, Event::Opened] {
            machine.on(event);
        }
        machine.on(Event::Timer);
        assert_eq!(wait(machine.on(Event::Closed)), Some(FIRST));
    }

    #[test]
    fn kubelets_missing_door_does_not_matter_while_it_reads() {
        let mut machine = live();
        assert_eq!(machine.on(Event::KubeletGone), []);
        assert!(machine.on(Event::KubeletAppeared).contains(&Action::Listen));
    }

    #[test]
    fn a_kubelet_that_comes_while_the_socket_is_made_is_not_missed() {
        let mut machine = live();
        machine.on(Event::KubeletGone);
        machine.on(Event::Closed);
        assert!(machine.on(Event::Timer).contains(&Action::Listen));
        assert!(machine.on(LISTENING).contains(&Action::Register));
    }

    #[test]
    fn late_answers_of_an_abandoned_register_are_ignored() {
        let mut machine = live();
        assert_eq!(machine.on(Event::Accepted), []);
        assert_eq!(machine.on(Event::Refused(String::new())), []);
        machine.on(Event::Closed);
        assert_eq!(machine.on(Event::Accepted), []);
    }
}
