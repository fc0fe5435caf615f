//! `bifolio check`: every byte of a file, through the cache, against an independent read.
//!
//! The file is divided into blocks. One pass reads them in order, one in a random order; each block
//! is read in every [`Way`], starting with a different one for each block, so that each way meets
//! both misses and hits. The cache's bytes are compared with an independent buffered read of the
//! file.
//!
//! That is a [`Round`]; each round has a new cache. Where files can be mapped, two more follow. The
//! first prefetches each block through the map, so that a page that cannot be read is an error. The
//! second, with an empty cache, only touches the map: an unreadable page has ended the check by
//! then.

mod mapped;

use std::fmt;
use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail};
use bifolio::{Cache, FeatureReport, File, Map, OpenOptions};
use bifolio_bench::{Progress, format_bytes};

use crate::cli::CheckOptions;
use crate::output;
use crate::terminal::Terminal;

/// Bytes compared at once.
const BLOCK_BYTES: u64 = 256 << 10;
/// Small reads and pins are at most this long.
const SMALL_BYTES_MAX: u64 = 4096;

/// Way to read bytes from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ReadLarge,
    ReadSmall,
    Pin,
    MapPrefetched,
    MapTouched,
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::ReadLarge => "read_at, large",
            Self::ReadSmall => "read_at, small",
            Self::Pin => "pin",
            Self::MapPrefetched => "map, prefetched",
            Self::MapTouched => "map, touched",
        })
    }
}

/// Work on one cache.
#[derive(Clone, Copy, Debug)]
struct Round {
    is_mapped: bool,
    ways: &'static [Way],
}

impl Round {
    const PLAIN: Self =
        Self { is_mapped: false, ways: &[Way::ReadLarge, Way::ReadSmall, Way::Pin] };
    const PREFETCHED: Self = Self {
        is_mapped: true,
        ways: &[Way::ReadLarge, Way::ReadSmall, Way::Pin, Way::MapPrefetched],
    };
    const TOUCHED: Self = Self { is_mapped: true, ways: &[Way::MapTouched] };

    /// Returns all ways, where files can be mapped or not.
    fn all(can_map: bool) -> &'static [Self] {
        // Pages that cannot be read must be found out before they are touched.
        if can_map { &[Self::PLAIN, Self::PREFETCHED, Self::TOUCHED] } else { &[Self::PLAIN] }
    }
}

/// The cache's bytes differ from the file's; the text says where and how.
#[derive(Debug)]
pub(crate) struct Different(String);

impl fmt::Display for Different {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Different {}

/// Checks the file.
pub(crate) fn run(options: &CheckOptions) -> anyhow::Result<()> {
    let name = options.file.display();
    let missing = why_no_maps(bifolio::features());
    let rounds = Round::all(missing.is_none());
    let mut progress = Terminal::new(1);
    let (mut compared_bytes, mut len_bytes) = (0, 0);
    for &round in rounds {
        let mut checker = Checker::open(options, round)?;
        checker.check_all(&mut progress)?;
        compared_bytes += checker.compared_bytes;
        len_bytes = checker.len_bytes;
    }
    drop(progress);
    if let Some(reason) = missing {
        output::print(&format!("{name}: maps skipped: {reason}\n"))?;
    }
    output::print(&format!(
        "{name}: equal ({}, {compared_bytes} bytes compared, {} ways, sequential and random \
         order)\n",
        format_bytes(len_bytes),
        rounds.iter().map(|round| round.ways.len()).sum::<usize>(),
    ))
}

/// Returns the reason why files cannot be mapped here, if any.
fn why_no_maps(features: Vec<FeatureReport>) -> Option<String> {
    let report = features.into_iter().find(|report| report.name == "user-faults");
    let missing = report.filter(|report| !report.in_use)?;
    Some(format!("{} is not available: {}", missing.name, missing.reason))
}

/// A file, through the cache and past it.
struct Checker {
    name: String,
    cached: File,
    /// All of the file, if it is mapped and not empty.
    map: Option<Map>,
    ways: &'static [Way],
    independent: fs::File,
    len_bytes: u64,
    random: fastrand::Rng,
    expected: Vec<u8>,
    answered: Vec<u8>,
    compared_bytes: u64,
}

impl Checker {
    fn open(options: &CheckOptions, round: Round) -> anyhow::Result<Self> {
        let name = options.file.display().to_string();
        let cache = Cache::builder().memory(options.memory).build()?;
        let open_options = match round.is_mapped {
            false => OpenOptions::new().folio_bytes(options.folio),
            true => OpenOptions::new().mappable(true),
        };
        let cached = cache.open(&options.file, &open_options)?;
        let is_mapped = round.is_mapped && cached.len() > 0;
        let map = is_mapped.then(|| cached.map(0..cached.len())).transpose()?;
        let independent = fs::File::open(&options.file).with_context(|| format!("open {name}"))?;
        let len_bytes = independent.metadata().with_context(|| format!("stat {name}"))?.len();
        Ok(Self {
            name,
            cached,
            map,
            ways: round.ways,
            independent,
            len_bytes,
            random: fastrand::Rng::with_seed(options.seed),
            expected: vec![0; BLOCK_BYTES as usize],
            answered: vec![0; BLOCK_BYTES as usize],
            compared_bytes: 0,
        })
    }

    fn check_all(&mut self, progress: &mut Terminal) -> anyhow::Result<()> {
        self.check_end()?;
        let mut blocks: Vec<u64> = (0..self.len_bytes.div_ceil(BLOCK_BYTES)).collect();
        for order in ["sequential", "random"] {
            if order == "random" {
                self.random.shuffle(&mut blocks);
            }
            progress.start(order, blocks.len() as u64);
            for &block in &blocks {
                self.check_block(block, order)?;
                progress.advance(1);
            }
        }
        Ok(())
    }

    /// Checks that the size is right, and that a read past the end returns nothing.
    fn check_end(&mut self) -> anyhow::Result<()> {
        let len_bytes = self.cached.len();
        if len_bytes != self.len_bytes {
            let theirs = self.len_bytes;
            return self.differs(format!("{len_bytes} bytes in the cache, {theirs} in the file"));
        }
        let mut bytes = [0; 100];
        let start = len_bytes.saturating_sub(50);
        for (pos_bytes, left) in [(len_bytes, 0), (len_bytes + 4096, 0), (start, len_bytes - start)]
        {
            let read = self.cached.read_at(&mut bytes, pos_bytes)? as u64;
            if read != left {
                return self.differs(format!("{read} bytes at {pos_bytes}, where {left} are"));
            }
        }
        Ok(())
    }

    fn check_block(&mut self, block: u64, order: &'static str) -> anyhow::Result<()> {
        let start = block * BLOCK_BYTES;
        let block_bytes = (self.len_bytes - start).min(BLOCK_BYTES) as usize;
        self.expected.truncate(0);
        self.expected.resize(block_bytes, 0);
        self.independent
            .read_exact_at(&mut self.expected, start)
            .with_context(|| format!("read {}", self.name))?;
        let first_way = self.random.usize(..self.ways.len());
        for step in 0..self.ways.len() {
            let way = self.ways[(first_way + step) % self.ways.len()];
            // Nothing of the last way may pass for this one.
            self.answered.clear();
            self.answered.extend(self.expected.iter().map(|byte| !byte));
            self.read_block(start, way)?;
            self.compare(start, way, order)?;
        }
        Ok(())
    }

    fn compare(&mut self, start: u64, way: Way, order: &'static str) -> anyhow::Result<()> {
        self.compared_bytes += self.expected.len() as u64;
        if self.answered == self.expected {
            return Ok(());
        }
        let mut pairs = self.answered.iter().zip(&self.expected);
        let index = pairs.position(|(ours, theirs)| ours != theirs).unwrap_or(0);
        self.differs(format!(
            "differs at byte {}: {:#04x} through the cache ({way}, {order} order), {:#04x} in the \
             file",
            start + index as u64,
            self.answered[index],
            self.expected[index],
        ))
    }

    fn differs(&self, how: String) -> anyhow::Result<()> {
        bail!(Different(format!("{}: {how}", self.name)))
    }

    /// Fills `answered` with the cache's bytes at `start`.
    fn read_block(&mut self, start: u64, way: Way) -> anyhow::Result<()> {
        let block_bytes = self.answered.len() as u64;
        let mut done = 0;
        while done < block_bytes {
            let pos_bytes = start + done;
            let left = block_bytes - done;
            let length = match way {
                Way::ReadLarge | Way::MapPrefetched => left,
                Way::ReadSmall | Way::MapTouched => self.random.u64(1..=SMALL_BYTES_MAX).min(left),
                Way::Pin => {
                    let folio_bytes = self.cached.folio_bytes();
                    let in_folio = folio_bytes - pos_bytes % folio_bytes;
                    self.random.u64(1..=SMALL_BYTES_MAX).min(left).min(in_folio)
                }
            };
            let map = || self.map.as_ref().context("the file is not mapped");
            let target = &mut self.answered[done as usize..(done + length) as usize];
            match way {
                Way::ReadLarge | Way::ReadSmall => {
                    let read = self.cached.read_at(target, pos_bytes)? as u64;
                    if read != length {
                        return self.differs(format!("{read} of {length} bytes at {pos_bytes}"));
                    }
                }
                Way::Pin => {
                    self.cached.pin(pos_bytes..pos_bytes + length)?.copy_to(0, target).unwrap()
                }
                Way::MapPrefetched => mapped::copy_prefetched(map()?, pos_bytes, target)?,
                Way::MapTouched => mapped::copy(map()?, pos_bytes, target),
            }
            done += length;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn options(file: PathBuf) -> CheckOptions {
        CheckOptions { file, memory: 8 << 20, folio: 4096, seed: 1 }
    }

    #[test]
    fn one_other_byte_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        };
        let mut bytes = vec![7; 3 * BLOCK_BYTES as usize + 100];
        let file = write("file", &bytes);
        let at = 2 * BLOCK_BYTES as usize + 4097;
        bytes[at] = 8;
        let other = write("other", &bytes);

        let mut checker = Checker::open(&options(file), Round::PLAIN).unwrap();
        checker.independent = fs::File::open(other).unwrap();
        checker.check_end().unwrap();
        assert!(checker.check_block(1, "sequential").is_ok());
        let error = checker.check_block(2, "sequential").unwrap_err();
        let different = error.downcast_ref::<Different>().expect("a difference, not a failure");
        assert!(different.0.contains(&format!("at byte {at}: 0x07")), "{different}");
        assert!(different.0.contains("0x08 in the file"), "{different}");
    }

    #[test]
    fn another_length_is_a_difference() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, [1; 5000]).unwrap();
        let mut checker = Checker::open(&options(file), Round::PLAIN).unwrap();
        checker.len_bytes = 5001;
        let error = checker.check_end().unwrap_err();
        assert!(error.downcast_ref::<Different>().is_some(), "{error:#}");
    }

    /// Returns the rounds with maps, if maps work here.
    fn mapped_rounds() -> &'static [Round] {
        let missing = why_no_maps(bifolio::features());
        if let Some(reason) = &missing {
            eprintln!("skipped: {reason}");
        }
        &Round::all(missing.is_none())[1..]
    }

    #[test]
    fn every_map_finds_another_byte_and_touches_come_last() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![7; BLOCK_BYTES as usize + 100]).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, vec![8; BLOCK_BYTES as usize + 100]).unwrap();
        let mut is_prefetched = false;
        for round in mapped_rounds() {
            let mut checker = Checker::open(&options(file.clone()), *round).unwrap();
            checker.ways = &round.ways[round.ways.len() - 1..];
            let way = checker.ways[0];
            match way {
                Way::MapPrefetched => is_prefetched = true,
                _ => assert!(way == Way::MapTouched && is_prefetched),
            }
            checker.check_block(1, "sequential").unwrap();
            checker.independent = fs::File::open(&other).unwrap();
            let error = checker.check_block(1, "sequential").unwrap_err();
            let different = error.downcast_ref::<Different>().expect("a difference");
            assert!(different.0.contains(&way.to_string()), "{different}");
        }
    }

    #[test]
    fn unreadable_pages_are_errors_before_they_are_touched() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let copy = dir.path().join("copy");
        for round in mapped_rounds().iter().take(1) {
            let bytes = vec![7; 3 * BLOCK_BYTES as usize];
            fs::write(&file, &bytes).unwrap();
            fs::write(&copy, &bytes).unwrap();
            let mut checker = Checker::open(&options(file.clone()), *round).unwrap();
            checker.ways = &[Way::MapPrefetched];
            checker.independent = fs::File::open(&copy).unwrap();
            // Another program, which does not use the cache, truncates the file.
            fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(BLOCK_BYTES).unwrap();
            checker.check_block(0, "sequential").unwrap();
            let error = checker.check_block(2, "sequential").unwrap_err();
            assert!(error.downcast_ref::<bifolio::Error>().is_some(), "{error:#}");
        }
    }

    #[test]
    fn a_machine_without_maps_checks_the_rest_and_says_why() {
        let builder = Cache::builder().memory(8 << 20);
        let cache = builder.disable(bifolio::Feature::UserFaults).build().unwrap();
        let reason = why_no_maps(cache.features()).expect("a reason");
        assert!(reason.starts_with("user-faults is not available: "), "{reason}");
        let rounds = Round::all(false);
        assert!(rounds.len() == 1 && !rounds[0].is_mapped);
    }
}
