//! The form in which a list of pages is stored.
//!
//! ```text
//!   "bifolio hot pages 1\n"
//!   sections: bytes of the body, 4 | CRC-32 of the section's number and of the body, 4 | body
//!     FILES   1, number of the first file; for each: kind, device, inode, birth, name
//!     RUNS    2, number of the file, coldness; for each run: pages since the last run, pages
//!     END     3, number of the sections before it
//! ```
//!
//! Numbers in a body are in LEB128: seven bits a byte, the lowest first. The files come first, then
//! runs, the hottest first, in the order of the files and of their pages. Each section stands for
//! itself, so damage costs no more than the section that has it.
//!
//! A list is not trusted: it names positions only, and each is checked to be one before it is used.

use crate::io::{FileIdentity, POSITION_BYTES_MAX};
use crate::page::PAGE_BYTES;
use std::collections::HashMap;
use std::ops::Range;

/// First bytes of a list of any version.
pub(super) const KIND: &[u8] = b"bifolio hot pages ";
/// First bytes of a list of this version.
const MAGIC: &[u8] = b"bifolio hot pages 1\n";
/// Bytes before the body of a section.
const HEAD_BYTES: usize = 8;
/// Bytes of a body after which another section begins.
const BODY_BYTES: usize = 32 << 10;
/// Upper bound on the bytes of a body: one more file, whose name may be a path.
const BODY_BYTES_MAX: usize = BODY_BYTES + (8 << 10);
const NAME_BYTES_MAX: usize = 4096;
const PAGES_MAX: u64 = POSITION_BYTES_MAX / PAGE_BYTES;

const FILES: u64 = 1;
const RUNS: u64 = 2;
const END: u64 = 3;

/// Number of coldnesses; 0 is the hottest.
pub(super) const COLDNESSES: usize = 4;
/// Number of coldnesses of pages that were used since the last scan.
pub(super) const USED_COLDNESSES: usize = 2;

/// A file of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedFile {
    pub(super) identity: FileIdentity,
    /// Time at which it was created, nanoseconds; 0 if that is not known.
    pub(super) born_ns: u64,
    pub(super) name: String,
}

impl ListedFile {
    /// Returns `true` for the same file, found later. Its device may have another number after a
    /// restart of the machine, and another file may have its number after it was deleted.
    pub(super) fn is(&self, other: &Self) -> bool {
        let (own, found) = (self.identity.numbers(), other.identity.numbers());
        let has_place = (own.0 == found.0, self.name == other.name);
        let is_there = if self.born_ns == 0 || other.born_ns == 0 {
            has_place == (true, true)
        } else {
            self.born_ns == other.born_ns && has_place != (false, false)
        };
        self.identity.is_custom() == other.identity.is_custom() && own.1 == found.1 && is_there
    }
}

fn push_number(body: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        body.push(number as u8 | 0x80);
        number >>= 7;
    }
    body.push(number as u8);
}

/// Takes a number off the front of `body`; `None` if there is none of 64 bits.
fn take_number(body: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (byte, rest) = body.split_first()?;
        *body = rest;
        let bits = u64::from(byte & 0x7F);
        if bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn checksum(number: u32, body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(body);
    hasher.finalize()
}

/// Runs of pages of one file and one coldness, as bodies of sections.
#[derive(Debug)]
pub(super) struct RunsOut {
    head: Vec<u8>,
    bodies: Vec<Vec<u8>>,
    /// End of the last run in the last body.
    end: u64,
    /// The last run, which may become longer.
    last: Range<u64>,
    pub(super) pages: u64,
}

impl RunsOut {
    pub(super) fn new(file: usize, coldness: usize) -> Self {
        let mut head = Vec::new();
        for number in [RUNS, file as u64, coldness as u64] {
            push_number(&mut head, number);
        }
        Self { head, bodies: Vec::new(), end: 0, last: 0..0, pages: 0 }
    }

    /// Adds pages after all others.
    pub(super) fn push(&mut self, pages: Range<u64>) {
        debug_assert!(self.last.end <= pages.start && !pages.is_empty(), "{pages:?}");
        self.pages += pages.end - pages.start;
        if self.last.end == pages.start && !self.last.is_empty() {
            self.last.end = pages.end;
            return;
        }
        self.close_run();
        self.last = pages;
    }

    fn close_run(&mut self) {
        if self.last.is_empty() {
            return;
        }
        if self.bodies.last().is_none_or(|body| body.len() >= BODY_BYTES) {
            self.bodies.push(self.head.clone());
            self.end = 0;
        }
        if let Some(body) = self.bodies.last_mut() {
            push_number(body, self.last.start - self.end);
            push_number(body, self.last.end - self.last.start);
        }
        self.end = self.last.end;
    }

    /// Returns the bodies.
    pub(super) fn finish(mut self) -> Vec<Vec<u8>> {
        self.close_run();
        self.bodies
    }
}

/// Returns the part of a name that a list has.
pub(super) fn name_of(name: &str) -> &str {
    let mut end = name.len().min(NAME_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

/// Returns a list of files and of bodies of runs, the hottest first.
pub(super) fn encode(files: &[ListedFile], runs: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let (mut bytes, mut sections) = (MAGIC.to_vec(), 0_u32);
    let mut add = |body: &[u8]| {
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        bytes.extend(length.to_le_bytes());
        bytes.extend(checksum(sections, body).to_le_bytes());
        bytes.extend(body);
        sections += 1;
        sections
    };
    let mut body = Vec::new();
    for (number, file) in files.iter().enumerate() {
        if body.is_empty() {
            push_number(&mut body, FILES);
            push_number(&mut body, number as u64);
        }
        let (device, inode) = file.identity.numbers();
        for number in [file.identity.is_custom().into(), device, inode, file.born_ns] {
            push_number(&mut body, number);
        }
        let name = name_of(&file.name);
        push_number(&mut body, name.len() as u64);
        body.extend(name.as_bytes());
        if body.len() >= BODY_BYTES {
            add(&body);
            body.clear();
        }
    }
    let mut count = 0;
    if !body.is_empty() {
        count = add(&body);
    }
    for body in runs {
        count = add(&body);
    }
    let mut end = Vec::new();
    push_number(&mut end, END);
    push_number(&mut end, count.into());
    add(&end);
    bytes
}

/// Runs of one section.
#[derive(Debug)]
pub(super) struct Runs {
    pub(super) file: usize,
    pub(super) coldness: usize,
    pub(super) pages: u64,
    body: Box<[u8]>,
    at: usize,
    /// End of the run in work.
    end: u64,
    /// Rest of it.
    left: Range<u64>,
}

impl Runs {
    /// Reads the body of a section; `None` if it has a run that no file has.
    fn of(body: &[u8]) -> Option<Self> {
        let mut rest = body;
        let (file, coldness) = (take_number(&mut rest)?, take_number(&mut rest)?);
        let (file, coldness) = (usize::try_from(file).ok()?, usize::try_from(coldness).ok()?);
        if coldness >= COLDNESSES {
            return None;
        }
        let body = rest.into();
        let (mut pages, mut end) = (0, 0);
        while !rest.is_empty() {
            let run = run_after(end, &mut rest)?;
            pages += run.end - run.start;
            end = run.end;
        }
        Some(Self { file, coldness, pages, body, at: 0, end: 0, left: 0..0 })
    }

    /// Returns the run that comes next, for the caller to shorten; `None` after the last.
    pub(super) fn current(&mut self) -> Option<&mut Range<u64>> {
        if self.left.is_empty() {
            let mut rest = &self.body[self.at..];
            self.left = run_after(self.end, &mut rest)?;
            self.end = self.left.end;
            self.at = self.body.len() - rest.len();
        }
        Some(&mut self.left)
    }
}

fn run_after(end: u64, body: &mut &[u8]) -> Option<Range<u64>> {
    let start = end.checked_add(take_number(body)?)?;
    let run = start..start.checked_add(take_number(body)?)?;
    (run.end <= PAGES_MAX && !run.is_empty()).then_some(run)
}

/// Contents of a list.
#[derive(Debug, Default)]
pub(super) struct List {
    /// By their numbers.
    pub(super) files: HashMap<usize, ListedFile>,
    pub(super) runs: Vec<Runs>,
    /// Set if something was left out: it was damaged, or is more than `pages_max`.
    pub(super) is_cut: bool,
}

impl List {
    /// Reads a list, the hottest runs of up to `pages_max` pages; `None` if it is none.
    pub(super) fn of(bytes: &[u8], pages_max: u64) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let (mut list, mut number, mut pages, mut is_whole) = (Self::default(), 0, 0, false);
        while let Some((head, body)) = rest.split_at_checked(HEAD_BYTES) {
            let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
            let length = (word(0) as usize).min(BODY_BYTES_MAX);
            let Some((body, behind)) = body.split_at_checked(length) else { break };
            rest = behind;
            let is_sound = checksum(number, body) == word(4);
            let is_end = is_sound.then(|| list.add(body, number, &mut pages)).flatten();
            list.is_cut |= is_end.is_none();
            is_whole = is_end == Some(true);
            if pages > pages_max {
                break;
            }
            number = number.wrapping_add(1);
        }
        list.is_cut |= !is_whole || !rest.is_empty();
        list.runs.retain(|runs| list.files.contains_key(&runs.file));
        Some(list)
    }

    /// Adds a section. Returns `true` for the end of the list, `None` for one of another form.
    fn add(&mut self, mut body: &[u8], number: u32, pages: &mut u64) -> Option<bool> {
        match take_number(&mut body)? {
            FILES => self.add_files(body)?,
            RUNS => {
                let runs = Runs::of(body)?;
                *pages = pages.saturating_add(runs.pages);
                self.runs.push(runs);
            }
            END => return Some(take_number(&mut body)? == u64::from(number)),
            _ => return None,
        }
        Some(false)
    }

    fn add_files(&mut self, mut body: &[u8]) -> Option<()> {
        let mut file = usize::try_from(take_number(&mut body)?).ok()?;
        while !body.is_empty() {
            let mut numbers = [0; 5];
            for number in &mut numbers {
                *number = take_number(&mut body)?;
            }
            let [kind, device, inode, born_ns, name_bytes] = numbers;
            let name_bytes = usize::try_from(name_bytes).ok()?;
            let (name, rest) = body.split_at_checked(name_bytes)?;
            body = rest;
            let identity = match kind {
                0 => FileIdentity::of_numbers(device, inode),
                _ => FileIdentity::custom(device, inode),
            };
            let name = String::from_utf8(name.to_vec()).ok()?;
            self.files.insert(file, ListedFile { identity, born_ns, name });
            file = file.checked_add(1)?;
        }
        Some(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use bifolio_testing::with_seeds;
    use fastrand::Rng;
    use std::collections::BTreeSet;

    /// Pages of a list: file, coldness, page.
    type Pages = BTreeSet<(String, usize, u64)>;

    fn file(number: u64) -> ListedFile {
        let identity = if number % 5 == 4 {
            FileIdentity::custom(number, 7)
        } else {
            FileIdentity::of_numbers(2049, 1 << number.min(63))
        };
        ListedFile { identity, born_ns: number * 1_000_000_007, name: format!("/data/{number}") }
    }

    /// Returns a list of random runs, and its pages.
    fn random_list(random: &mut Rng, files: u64, runs_max: usize) -> (Vec<u8>, Pages) {
        let files: Vec<_> = (0..files).map(file).collect();
        let (mut pages, mut bodies) = (Pages::new(), Vec::new());
        for coldness in 0..COLDNESSES {
            for (number, file) in files.iter().enumerate() {
                let mut runs = RunsOut::new(number, coldness);
                let mut start = random.u64(0..1 << 40);
                for _ in 0..random.usize(..=runs_max) {
                    let end = start + random.u64(1..4);
                    runs.push(start..end);
                    pages.extend((start..end).map(|page| (file.name.clone(), coldness, page)));
                    start = end + random.choice([0, 1, 100, 1 << 20]).unwrap();
                }
                bodies.extend(runs.finish());
            }
        }
        (encode(&files, bodies), pages)
    }

    fn pages_of(list: &mut List) -> Pages {
        let mut pages = Pages::new();
        for runs in &mut list.runs {
            let (name, mut counted) = (list.files[&runs.file].name.clone(), 0);
            while let Some(run) = runs.current() {
                // A reader takes them one by one.
                let page = run.start;
                run.start += 1;
                counted += 1;
                assert!(pages.insert((name.clone(), runs.coldness, page)));
            }
            assert_eq!(counted, runs.pages);
        }
        pages
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        with_seeds(20, |seed| {
            let mut random = Rng::with_seed(seed);
            let files = random.u64(0..8);
            // Several sections of one file.
            let (bytes, pages) = random_list(&mut random, files, 9000);
            let mut list = List::of(&bytes, u64::MAX).unwrap();
            assert!(!list.is_cut);
            assert_eq!(pages_of(&mut list), pages);
        });
        // More than a section of files.
        let files: Vec<_> = (0..3000).map(file).collect();
        let list = List::of(&encode(&files, None), u64::MAX).unwrap();
        assert!(!list.is_cut && list.runs.is_empty());
        assert!(files.iter().enumerate().all(|(number, file)| list.files[&number] == *file));
    }

    #[test]
    fn the_hottest_pages_come_first_and_a_limit_cuts_the_rest() {
        let runs = |coldness: usize| {
            let mut runs = RunsOut::new(0, coldness);
            runs.push(10 * coldness as u64..10 * coldness as u64 + 5);
            runs.finish()
        };
        let bytes = encode(&[file(0)], (0..COLDNESSES).flat_map(runs));
        let mut list = List::of(&bytes, 7).unwrap();
        assert!(list.is_cut);
        let found: Vec<_> = pages_of(&mut list).into_iter().map(|(_, _, page)| page).collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]);
    }

    /// A damaged list has a part of the whole one.
    #[test]
    fn a_damaged_list_is_refused_or_a_part_of_it_is_read() {
        with_seeds(10, |seed| {
            let mut random = Rng::with_seed(seed);
            let (bytes, pages) = random_list(&mut random, 3, 8);
            let check = |damaged: &[u8], what: &str| {
                let Some(mut list) = List::of(damaged, u64::MAX) else { return };
                let found = pages_of(&mut list);
                assert!(found.is_subset(&pages), "{what}");
                assert!(list.is_cut, "{what}: unseen");
            };
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << random.u32(0..8);
                check(&damaged, &format!("byte {at} flipped"));
                damaged[at] = random.u8(..);
                damaged.truncate(random.usize(at..=bytes.len()));
                if damaged != bytes {
                    check(&damaged, &format!("byte {at} changed, then cut"));
                }
                check(&bytes[..at], &format!("cut at {at}"));
            }
            let twice = [&bytes[..], &bytes[MAGIC.len()..]].concat();
            check(&twice, "written twice");
            let foreign: Vec<u8> = (0..1000).map(|_| random.u8(..)).collect();
            assert!(List::of(&foreign, u64::MAX).is_none());
            check(&[MAGIC, &foreign].concat(), "a foreign file of this form");
        });
    }

    /// A body that has the right checksum and is wrong all the same.
    #[test]
    fn a_list_of_impossible_runs_is_not_used() {
        let body = |numbers: &[u64]| {
            let mut body = Vec::new();
            numbers.iter().for_each(|number| push_number(&mut body, *number));
            body
        };
        for numbers in [
            &[RUNS, 0, COLDNESSES as u64, 1, 1][..],
            &[RUNS, 0, 0, 1, 0],
            &[RUNS, 0, 0, PAGES_MAX, 1],
            &[RUNS, 0, 0, 5, u64::MAX],
            &[RUNS, 0, 0, 5, 1, u64::MAX, 1],
            &[RUNS, 0, 0, 5],
            &[RUNS, u64::MAX],
            &[FILES, 9, 0, 1, 2, 3, 9],
            &[7],
            &[],
        ] {
            let list = List::of(&encode(&[file(0)], [body(numbers)]), u64::MAX).unwrap();
            assert!(list.is_cut && list.runs.is_empty(), "{numbers:?}");
        }
        let mut unfinished: &[u8] = &[0xFF; 10];
        assert_eq!(take_number(&mut unfinished), None);
        let mut last = Vec::new();
        push_number(&mut last, u64::MAX);
        assert_eq!(take_number(&mut &last[..]), Some(u64::MAX));
    }

    #[test]
    fn a_file_is_known_by_its_birth_or_by_its_place() {
        let of = |device, born_ns, name: &str| ListedFile {
            identity: FileIdentity::of_numbers(device, 12),
            born_ns,
            name: name.to_owned(),
        };
        let listed = of(1, 5, "a");
        assert!(listed.is(&of(1, 5, "a")));
        assert!(listed.is(&of(1, 5, "renamed")) && listed.is(&of(2, 5, "a")));
        assert!(!listed.is(&of(2, 5, "b")), "neither its device nor its name");
        assert!(!listed.is(&of(1, 6, "a")), "deleted, and its number used again");
        assert!(listed.is(&of(1, 0, "a")) && !listed.is(&of(1, 0, "b")));
        assert!(!listed.is(&of(2, 0, "a")));
        let other = ListedFile { identity: FileIdentity::of_numbers(1, 13), ..listed.clone() };
        assert!(!listed.is(&other));
        let custom = ListedFile { identity: FileIdentity::custom(1, 12), ..listed.clone() };
        assert!(!listed.is(&custom));
        let long = "\u{e9}".repeat(3000);
        assert_eq!(name_of(&long).len(), NAME_BYTES_MAX);
        assert_eq!(name_of(&format!("x{long}")).len(), NAME_BYTES_MAX - 1);
    }
}
