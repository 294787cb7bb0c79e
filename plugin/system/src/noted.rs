//! What was stored last, noted in the file outside redb's pages. Where its newest commit is damaged, redb goes on with
//! the one before, and says so only sometimes; the note tells how much that is.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use tessera_model::time_format::utc;

/// Where the note is: redb has the first 320 bytes of the first page, and leaves the rest of it.
const AT: u64 = 2048;
const MAGIC: u64 = u64::from_le_bytes(*b"tessera\x01");
const LEN: usize = 32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    pub commits: u64,
    /// Up to when, Unix seconds.
    pub until: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Where what is left ends, Unix seconds; 0 where nothing is.
    pub left_until: u32,
    /// Where what was stored ended, Unix seconds; `None` where the file does not tell any more.
    pub stored_until: Option<u32>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |second: u32| utc(i64::from(second) * 1000);
        match self.left_until {
            0 => write!(f, "nothing that was stored is left")?,
            second => write!(f, "it goes back to {}", time(second))?,
        }
        match self.stored_until {
            Some(second) => write!(f, ", and what was stored until {} is lost", time(second)),
            None => write!(f, ", and what was stored after that, if anything was, is lost"),
        }
    }
}

impl Noted {
    fn encode(self) -> [u8; LEN] {
        let mut out = [0; LEN];
        for (word, at) in [MAGIC, self.commits, u64::from(self.until)].into_iter().zip(0..) {
            out[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let sum = sum(&out[..24]);
        out[24..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        let word = |at: usize| bytes[at * 8..][..8].try_into().map_or(0, u64::from_le_bytes);
        let until = u32::try_from(word(2)).ok()?;
        let is_whole = word(0) == MAGIC && word(3) == sum(&bytes[..24]);
        is_whole.then_some(Noted { commits: word(1), until })
    }

    /// The note of a file of redb's; `None` where it has none that is whole.
    pub fn read(file: &File) -> Option<Self> {
        let mut bytes = [0; LEN];
        file.read_exact_at(&mut bytes, AT).ok()?;
        Self::decode(&bytes)
    }

    pub fn write(self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.encode(), AT)
    }

    /// What a database that holds so much has lost, where its file noted `noted`.
    pub fn lost(self, noted: Option<Self>) -> Option<Lost> {
        match noted {
            // A kill comes between a commit and its note.
            Some(noted) if noted.commits <= self.commits => None,
            Some(noted) => Some(Lost { left_until: self.until, stored_until: Some(noted.until) }),
            // No note was ever made by an earlier version.
            None if self.commits == 0 => None,
            None => Some(Lost { left_until: self.until, stored_until: None }),
        }
    }
}

/// FNV-1a, 64 bits.
fn sum(bytes: &[u8]) -> u64 {
    let fold = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_whole_or_none() {
        let noted = Noted { commits: 7, until: 1_750_032_000 };
        let bytes = noted.encode();
        assert_eq!(Noted::decode(&bytes), Some(noted));
        for bit in 0..LEN * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Noted::decode(&other), None, "{bit}");
        }
        assert_eq!(Noted::decode(&[0; LEN]), None);
        assert_eq!(Noted::decode(&[0xff; LEN]), None);
    }

    #[test]
    fn what_is_lost_is_told_by_the_note() {
        let at = |commits, until| Noted { commits, until };
        let now = at(5, 1_750_032_000);
        assert_eq!(now.lost(Some(now)), None);
        assert_eq!(now.lost(Some(at(4, 0))), None);
        assert_eq!(at(0, 0).lost(None), None);
        let lost = now.lost(Some(at(6, 1_750_032_060))).unwrap();
        assert_eq!(
            lost.to_string(),
            "it goes back to 2025-06-16 00:00:00, and what was stored until 2025-06-16 00:01:00 is lost"
        );
        assert!(now.lost(None).unwrap().to_string().contains("if anything was"));
    }
}
