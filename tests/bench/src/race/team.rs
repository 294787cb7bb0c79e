//! The racing processes.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::Context;

use super::{PROCESSES, THREADS};
use crate::world::{Pages, World};

struct Member {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Member {
    fn start(world: &World, pages: &Pages) -> anyhow::Result<Self> {
        let mut command = world.hooked(&["race", &THREADS.to_string()], pages)?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(world.log()?).spawn()?;
        let orders = child.stdin.take().context("piped")?;
        let answers = BufReader::new(child.stdout.take().context("piped")?);
        Ok(Self { child, orders, answers })
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            let status = self.child.wait()?;
            anyhow::bail!("a racing process ended: {status}");
        }
        Ok(line.trim().to_owned())
    }
}

/// All of them; a killed one leaves its place empty until [`Team::refill`].
pub struct Team<'a> {
    world: &'a World,
    pages: &'a Pages,
    members: Vec<Option<Member>>,
    /// Those that joined after the order that the others are to answer.
    late: Vec<usize>,
}

impl<'a> Team<'a> {
    pub fn start(world: &'a World, pages: &'a Pages) -> anyhow::Result<Self> {
        let members = (0..PROCESSES).map(|_| None).collect();
        let mut team = Self { world, pages, members, late: Vec::new() };
        team.refill()?;
        team.late.clear();
        Ok(team)
    }

    /// Fills empty places; a process that cannot open its context, which fits, fails the race.
    pub fn refill(&mut self) -> anyhow::Result<()> {
        for place in 0..self.members.len() {
            if self.members[place].is_none() {
                let mut member = Member::start(self.world, self.pages)?;
                anyhow::ensure!(member.answer()? == "ready", "a racing process did not start");
                self.members[place] = Some(member);
                self.late.push(place);
            }
        }
        Ok(())
    }

    /// Gives each member the order that `order` makes for its place.
    pub fn order(&mut self, order: impl Fn(usize) -> String) -> anyhow::Result<()> {
        self.late.clear();
        for (place, member) in self.members.iter_mut().enumerate() {
            if let Some(member) = member {
                writeln!(member.orders, "{}", order(place))?;
            }
        }
        Ok(())
    }

    /// The answers of all that were given the order and live.
    pub fn answers(&mut self) -> anyhow::Result<Vec<u64>> {
        let late = std::mem::take(&mut self.late);
        let members = self.members.iter_mut().enumerate();
        let asked = members.filter(|(place, _)| !late.contains(place));
        asked.filter_map(|(_, m)| m.as_mut()).map(|m| Ok(m.answer()?.parse()?)).collect()
    }

    /// SIGKILL; whether there was anybody.
    pub fn kill(&mut self, place: usize) -> bool {
        let Some(mut member) = self.members[place].take() else { return false };
        // Gone when this returns: its address space, and with it its slot's lock, is released.
        let _ = member.child.kill();
        let _ = member.child.wait();
        true
    }

    pub fn end(mut self) -> anyhow::Result<()> {
        for member in self.members.iter_mut().filter_map(Option::take) {
            drop(member.orders);
            let mut child = member.child;
            let status = child.wait()?;
            anyhow::ensure!(status.success(), "a racing process ended: {status}");
        }
        Ok(())
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        for member in self.members.iter_mut().flatten() {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}
