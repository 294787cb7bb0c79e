//! The terminal: taken over, drawn upon, and given back however the program ends.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Once;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use anyhow::Context;
use crossterm::event::{self, Event};
use crossterm::style::Print;
use crossterm::terminal::{
    self, BeginSynchronizedUpdate, Clear, ClearType, DisableLineWrap, EnableLineWrap,
    EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode,
};
use crossterm::{cursor, execute, queue};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::feed::News;
use super::model::Model;
use super::view::{self, Moment};
use tessera_model::clock::unix_ms;
use tessera_system::terminal::has_colour;

/// Longest time until a key, an answer or a signal is heard.
const TURN: Duration = Duration::from_millis(50);

/// Shows the model until it is left.
pub(super) fn run(
    mut model: Model,
    news: &Receiver<News>,
    every: Duration,
) -> anyhow::Result<ExitCode> {
    give_back_on_panic();
    let taken = Taken::take().context("the terminal (`--once` and `-o json` need none)")?;
    let keyboard = Keyboard::open().context("the terminal")?;
    // What the screen shows.
    let mut shown = None;
    let colour = has_colour();
    while !model.quit {
        let moment = Moment { now_unix_ms: unix_ms(), every, live: true };
        let size = terminal::size()?;
        let picture = (size, view::draw(&model, colour, moment, size));
        show(shown.as_ref(), &picture)?;
        shown = Some(picture);
        // Until something has changed; the clock of a plugin that is silent does, too.
        loop {
            let mut changed = false;
            if !keyboard.wait()? {
                return Ok(ExitCode::SUCCESS);
            }
            if event::poll(Duration::ZERO)? {
                if let Event::Key(key) = event::read()? {
                    model.press(key);
                }
                changed = true;
            }
            while !model.quit {
                match news.try_recv() {
                    Ok(Ok((fleet, at))) => model.take(fleet, at),
                    Ok(Err(reason)) => model.miss(reason, unix_ms()),
                    Err(TryRecvError::Empty) => break,
                    // A signal asked the process to end.
                    Err(TryRecvError::Disconnected) => model.quit = true,
                }
                changed = true;
            }
            if changed {
                break;
            }
        }
    }
    drop(taken);
    Ok(ExitCode::SUCCESS)
}

/// The area, and what is in it from above.
type Picture = ((u16, u16), Vec<String>);

/// Draws the lines in which a picture differs from what is shown.
fn show(shown: Option<&Picture>, (size, lines): &Picture) -> io::Result<()> {
    let mut out = io::stdout().lock();
    queue!(out, BeginSynchronizedUpdate)?;
    let shown = shown.filter(|(before, _)| before == size);
    if shown.is_none() {
        queue!(out, Clear(ClearType::All))?;
    }
    for (row, line) in (0..).zip(lines) {
        if shown.is_some_and(|(_, shown)| shown.get(usize::from(row)) == Some(line)) {
            continue;
        }
        queue!(out, cursor::MoveTo(0, row), Clear(ClearType::UntilNewLine), Print(line))?;
    }
    queue!(out, cursor::MoveTo(0, u16::try_from(lines.len()).unwrap_or(u16::MAX)))?;
    queue!(out, Clear(ClearType::FromCursorDown), EndSynchronizedUpdate)?;
    out.flush()
}

/// Where keys come from: what crossterm reads. It is waited for here, because crossterm reads a terminal
/// that has hung up again and again, and never returns.
struct Keyboard(Option<File>);

impl Keyboard {
    fn open() -> io::Result<Self> {
        let other = !io::stdin().is_terminal();
        Ok(Keyboard(other.then(|| File::open("/dev/tty")).transpose()?))
    }

    /// Waits a turn for something to read. False if the terminal is gone.
    fn wait(&self) -> io::Result<bool> {
        let stdin = io::stdin();
        let fd = self.0.as_ref().map_or(stdin.as_fd(), AsFd::as_fd);
        let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
        let turn = PollTimeout::try_from(TURN).unwrap_or(PollTimeout::ZERO);
        match poll(&mut fds, turn) {
            // A signal: the terminal's new size, say.
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        Ok(!fds[0].revents().is_some_and(|seen| seen.intersects(gone)))
    }
}

/// The terminal in raw mode, on its other screen.
struct Taken;

impl Taken {
    fn take() -> io::Result<Self> {
        let taken = Taken;
        enable_raw_mode()?;
        // A table may need more columns than a narrow terminal has.
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide, DisableLineWrap)?;
        Ok(taken)
    }

    fn give_back(&self) {
        // A terminal that is gone needs nothing back.
        let _ = disable_raw_mode();
        let _ = execute!(io::stdout(), EnableLineWrap, cursor::Show, LeaveAlternateScreen);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A panic ends the process and drops nothing: its text would stand on a screen that is about to go.
fn give_back_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            Taken.give_back();
            before(info);
        }));
    });
}
