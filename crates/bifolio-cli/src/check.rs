//! `bifolio check`: every byte of a file, through the cache, against an independent read.
//!
//! The file is cut into blocks. One pass takes them in order, one in a random order; each block is
//! read in every [`Way`], beginning with another way for each block, so that each way meets both
//! misses and hits. What the cache answers is compared with a buffered read of the file that knows
//! nothing of it.

use std::fmt;
use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail};
use bifolio::{Cache, File, OpenOptions};
use bifolio_bench::{Progress, format_bytes};

use crate::cli::CheckOptions;
use crate::output;
use crate::terminal::Terminal;

/// How much is compared at once.
const BLOCK_BYTES: u64 = 256 << 10;
/// Small reads and pins are at most this long.
const SMALL_BYTES_MAX: u64 = 4096;

/// How bytes come out of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ReadLarge,
    ReadSmall,
    Pin,
    Pins,
}

const WAYS: [Way; 4] = [Way::ReadLarge, Way::ReadSmall, Way::Pin, Way::Pins];

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::ReadLarge => "read_at, large",
            Self::ReadSmall => "read_at, small",
            Self::Pin => "pin",
            Self::Pins => "pins",
        })
    }
}

/// The cache answered something else than the file holds; where and what.
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
    let mut checker = Checker::open(options)?;
    checker.check_end()?;
    let mut progress = Terminal::new();
    let mut blocks: Vec<u64> = (0..checker.len_bytes.div_ceil(BLOCK_BYTES)).collect();
    for order in ["sequential", "random"] {
        if order == "random" {
            checker.random.shuffle(&mut blocks);
        }
        progress.start(order, blocks.len() as u64);
        for &block in &blocks {
            checker.check_block(block, order)?;
            progress.advance(1);
        }
    }
    drop(progress);
    output::print(&format!(
        "{}: equal ({}, {} bytes compared, {} ways, sequential and random order)\n",
        checker.name,
        format_bytes(checker.len_bytes),
        checker.compared_bytes,
        WAYS.len(),
    ))
}

/// A file, through the cache and past it.
struct Checker {
    name: String,
    cached: File,
    independent: fs::File,
    len_bytes: u64,
    random: fastrand::Rng,
    expected: Vec<u8>,
    answered: Vec<u8>,
    compared_bytes: u64,
}

impl Checker {
    fn open(options: &CheckOptions) -> anyhow::Result<Self> {
        let name = options.file.display().to_string();
        let cache = Cache::builder().memory(options.memory).build()?;
        let open_options = OpenOptions::new().folio_bytes(options.folio);
        let cached = cache.open(&options.file, &open_options)?;
        let independent = fs::File::open(&options.file).with_context(|| format!("open {name}"))?;
        let len_bytes = independent.metadata().with_context(|| format!("stat {name}"))?.len();
        Ok(Self {
            name,
            cached,
            independent,
            len_bytes,
            random: fastrand::Rng::with_seed(options.seed),
            expected: vec![0; BLOCK_BYTES as usize],
            answered: vec![0; BLOCK_BYTES as usize],
            compared_bytes: 0,
        })
    }

    /// The size is right, and nothing is read beyond it.
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
        let first_way = self.random.usize(..WAYS.len());
        for turn in 0..WAYS.len() {
            let way = WAYS[(first_way + turn) % WAYS.len()];
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

    /// Fills `answered` with what the cache says stands at `start`.
    fn read_block(&mut self, start: u64, way: Way) -> anyhow::Result<()> {
        let block_bytes = self.answered.len() as u64;
        let mut done = 0;
        while done < block_bytes {
            let pos_bytes = start + done;
            let left = block_bytes - done;
            let length = match way {
                Way::ReadLarge | Way::Pins => left,
                Way::ReadSmall => self.random.u64(1..=SMALL_BYTES_MAX).min(left),
                Way::Pin => {
                    let folio_bytes = self.cached.folio_bytes();
                    let in_folio = folio_bytes - pos_bytes % folio_bytes;
                    self.random.u64(1..=SMALL_BYTES_MAX).min(left).min(in_folio)
                }
            };
            let target = &mut self.answered[done as usize..(done + length) as usize];
            match way {
                Way::ReadLarge | Way::ReadSmall => {
                    let read = self.cached.read_at(target, pos_bytes)? as u64;
                    if read != length {
                        return self.differs(format!("{read} of {length} bytes at {pos_bytes}"));
                    }
                }
                Way::Pin => self.cached.pin(pos_bytes..pos_bytes + length)?.copy_to(target),
                Way::Pins => copy_pins(&self.cached, pos_bytes, target)?,
            }
            done += length;
        }
        Ok(())
    }
}

/// Walks the pins of a range; they must be exactly as long as it, together.
fn copy_pins(file: &File, pos_bytes: u64, target: &mut [u8]) -> anyhow::Result<()> {
    let mut rest = &mut target[..];
    for pin in file.pins(pos_bytes..pos_bytes + rest.len() as u64) {
        let pin = pin?;
        let Some((part, after)) = rest.split_at_mut_checked(pin.len()) else {
            bail!(Different(format!("pins of a range longer than it, at {pos_bytes}")));
        };
        pin.copy_to(part);
        rest = after;
    }
    if !rest.is_empty() {
        let missing = rest.len();
        bail!(Different(format!(
            "pins of a range {missing} bytes shorter than it, at {pos_bytes}"
        )));
    }
    Ok(())
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

        let mut checker = Checker::open(&options(file)).unwrap();
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
        let mut checker = Checker::open(&options(file)).unwrap();
        checker.len_bytes = 5001;
        let error = checker.check_end().unwrap_err();
        assert!(error.downcast_ref::<Different>().is_some(), "{error:#}");
    }
}
