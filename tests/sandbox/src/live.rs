//! A sandbox that stands: commands from the terminal, a script and other terminals, until its end.

use std::io::{self, BufRead, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;
use tessera_system::terminal;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, mpsc};

use super::USAGE;
use super::command::{self, Command};
use super::control;
use super::greeting;
use super::sandbox::{Reply, Sandbox};
use super::script::Line;
use super::words::words;

/// `128 + SIGINT`.
pub const INTERRUPTED: u8 = 130;
/// How often it is looked for what ended by itself.
const LOOK: Duration = Duration::from_millis(500);
const PROMPT: &str = "sandbox> ";

/// Signals that end a sandbox in order.
#[derive(Debug)]
pub struct Ends(Mutex<[Signal; 3]>);

impl Ends {
    /// Listens from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen() -> io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [a, b, c] = kinds.map(signal);
        Ok(Self(Mutex::new([a?, b?, c?])))
    }

    /// Waits for one.
    pub async fn wait(&self) {
        let mut all = self.0.lock().await;
        let [a, b, c] = &mut *all;
        tokio::select! { _ = a.recv() => {}, _ = b.recv() => {}, _ = c.recv() => {} }
    }
}

/// Runs until Ctrl-C, `exit`, or the script's end.
///
/// # Errors
/// No socket for other terminals.
pub async fn live(
    mut sandbox: Sandbox,
    script: Option<Vec<Line>>,
    stay: bool,
    ends: &Ends,
) -> anyhow::Result<ExitCode> {
    let mut requests = match control::serve(sandbox.scratch.path()) {
        Ok(requests) => requests,
        Err(error) => {
            sandbox.strike().await;
            return Err(error);
        }
    };
    say(&greeting::text(&sandbox));
    let mut code = ExitCode::SUCCESS;
    if let Some(lines) = &script {
        let ended = tokio::select! {
            ended = play(&mut sandbox, lines) => Some(ended),
            () = ends.wait() => None,
        };
        let on = matches!(ended, Some(Played::Through)) && stay;
        match ended {
            None => code = ExitCode::from(INTERRUPTED),
            Some(Played::Failed(failed)) => code = ExitCode::from(failed),
            Some(Played::Through | Played::Exit) => {}
        }
        if !on {
            sandbox.strike().await;
            return Ok(code);
        }
    }
    let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let mut lines = read_lines();
    let mut look = tokio::time::interval(LOOK);
    let mut open = true;
    prompt(terminal);
    loop {
        let (command, tell) = tokio::select! {
            () = ends.wait() => break,
            line = lines.recv(), if open => match line {
                Some(line) => match understand(&line) {
                    Some(command) => (command, None),
                    None => { prompt(terminal); continue }
                },
                // Ctrl-D at the prompt; where nobody types, commands come from other terminals.
                None if terminal => break,
                None => { open = false; continue }
            },
            Some((command, tell)) = requests.recv() => (command, Some(tell)),
            _ = look.tick() => {
                let news = sandbox.news();
                if !news.is_empty() {
                    say(&format!("{}{}", if terminal { "\n" } else { "" }, news.join("\n")));
                    prompt(terminal);
                }
                continue;
            }
        };
        let reply = tokio::select! {
            reply = sandbox.obey(command) => reply,
            () = ends.wait() => break,
        };
        sandbox.settle();
        let ends_now = reply.ends;
        match tell {
            Some(tell) => {
                let _ = tell.send(reply);
            }
            None => {
                show(&reply);
            }
        }
        if ends_now {
            // What was just answered is still on its way.
            tokio::time::sleep(Duration::from_millis(50)).await;
            break;
        }
        prompt(terminal);
    }
    if terminal {
        say("");
    }
    sandbox.strike().await;
    Ok(code)
}

/// How a script ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Played {
    Through,
    Exit,
    /// With the script's exit status.
    Failed(u8),
}

async fn play(sandbox: &mut Sandbox, lines: &[Line]) -> Played {
    for line in lines {
        say(&format!("{PROMPT}{}", line.text));
        let reply = sandbox.obey(line.command.clone()).await;
        sandbox.settle();
        if reply.ends {
            return Played::Exit;
        }
        match (reply.code == 0, line.must_fail) {
            (true, false) => show(&reply),
            (false, true) => say(&format!("{} (as it must)", reply.text)),
            (false, false) => {
                eprintln!("{}: {}: {}", line.place, line.text, reply.text);
                // A line that is no command makes the script wrong, whatever ran before it.
                return Played::Failed(if reply.code == USAGE { USAGE } else { 1 });
            }
            (true, true) => {
                let said = &reply.text;
                eprintln!("{}: {}: it was to fail, and did not: {said}", line.place, line.text);
                return Played::Failed(1);
            }
        }
    }
    Played::Through
}

fn understand(line: &str) -> Option<Command> {
    let words = match words(line) {
        Ok(words) => words,
        Err(error) => {
            eprintln!("{error}");
            return None;
        }
    };
    if words.is_empty() {
        return None;
    }
    match command::parse(&words) {
        Ok(command) => Some(command),
        Err((text, true)) => {
            say(&text);
            None
        }
        Err((text, false)) => {
            eprintln!("{text}");
            None
        }
    }
}

/// Lines of standard input, from a thread that ends with the program.
fn read_lines() -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if send.blocking_send(line).is_err() {
                break;
            }
        }
    });
    lines
}

fn show(reply: &Reply) {
    if reply.code != 0 {
        eprintln!("{}", reply.text);
    } else if !reply.text.is_empty() {
        say(&reply.text);
    }
}

fn prompt(terminal: bool) {
    if terminal {
        emit(PROMPT);
    }
}

fn say(text: &str) {
    emit(&format!("{text}\n"));
}

fn emit(text: &str) {
    // A full disk must not end the sandbox before it has cleaned up.
    let _ = terminal::print(text);
}
