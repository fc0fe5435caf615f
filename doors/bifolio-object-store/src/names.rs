//! The names of the objects in a disk tier, so that a prefix can be dropped after a restart.
//!
//! Entries are appended when the first part of an object is put into the tier, and flushed with it
//! or never. A part whose object has no name is not restored. The file is rewritten without the
//! objects that have left when it has grown to more than twice of what was needed last.
//!
//! ```text
//! entry     checksum of the rest (8 bytes), object (16), length (4), location
//! ```

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path as FilePath, PathBuf};

use object_store::path::Path;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::object::ObjectId;
use super::object_store;
use super::tier::above_standard;

/// Name of the file, and of its next version while that is written.
pub(crate) const NAMES: &str = "names";
const NEXT: &str = "names.next";

const SEED: u64 = u64::from_le_bytes(*b"bifoname");
const HEAD_BYTES: usize = 28;
/// Longest location that is believed: longer than any store allows.
const LOCATION_BYTES_MAX: usize = 1 << 16;
/// Bytes that the file may grow by, beside what it has, before it is rewritten.
const GROWTH_BYTES: u64 = 1 << 20;

/// The file of names.
#[derive(Debug)]
pub(crate) struct Names {
    file: fs::File,
    directory: PathBuf,
    length_bytes: u64,
    /// Length at which the file is rewritten.
    length_bytes_max: u64,
}

impl Names {
    /// Opens the file, and returns the names in it, up to the first entry that is damaged.
    pub(crate) fn open(directory: &FilePath) -> io::Result<(Self, HashMap<ObjectId, Path>)> {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = above_standard(options.open(directory.join(NAMES))?)?;
        let mut reader = BufReader::with_capacity(1 << 16, &file);
        let (mut names, mut length_bytes) = (HashMap::new(), 0);
        while let Some((object, location, bytes)) = next(&mut reader)? {
            names.insert(object, location);
            length_bytes += bytes;
        }
        let directory = directory.to_owned();
        let length_bytes_max = 2 * length_bytes + GROWTH_BYTES;
        Ok((Self { file, directory, length_bytes, length_bytes_max }, names))
    }

    /// Adds an object. Returns `true` if the file should be rewritten.
    pub(crate) fn add(&mut self, object: &ObjectId, location: &Path) -> io::Result<bool> {
        let entry = encode(object, location);
        self.file.write_all_at(&entry, self.length_bytes)?;
        self.length_bytes += entry.len() as u64;
        Ok(self.length_bytes > self.length_bytes_max)
    }

    /// Writes a new file with these objects.
    pub(crate) fn rewrite(
        &mut self,
        objects: impl IntoIterator<Item = (ObjectId, Path)>,
    ) -> io::Result<()> {
        // Not again at once if this fails.
        self.length_bytes_max = self.length_bytes_max.saturating_mul(2);
        let next = self.directory.join(NEXT);
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let file = above_standard(options.open(&next)?)?;
        let mut writer = io::BufWriter::with_capacity(1 << 16, &file);
        let mut length_bytes = 0;
        for (object, location) in objects {
            let entry = encode(&object, &location);
            writer.write_all(&entry)?;
            length_bytes += entry.len() as u64;
        }
        writer.flush()?;
        drop(writer);
        fs::rename(next, self.directory.join(NAMES))?;
        (self.file, self.length_bytes) = (file, length_bytes);
        self.length_bytes_max = 2 * length_bytes + GROWTH_BYTES;
        Ok(())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn encode(object: &ObjectId, location: &Path) -> Vec<u8> {
    let location = location.as_ref().as_bytes();
    let mut entry = vec![0; 8];
    entry.extend(object);
    entry.extend((location.len() as u32).to_le_bytes());
    entry.extend(location);
    let checksum = xxh3_64_with_seed(&entry[8..], SEED);
    entry[..8].copy_from_slice(&checksum.to_le_bytes());
    entry
}

/// Reads an entry, and returns it with its length; `None` if there is none, or it is damaged.
fn next(reader: &mut impl Read) -> io::Result<Option<(ObjectId, Path, u64)>> {
    let mut entry = vec![0; HEAD_BYTES];
    if !fill(reader, &mut entry)? {
        return Ok(None);
    }
    let field =
        |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let (checksum, length) = (field(&entry[..8]), field(&entry[24..28]) as usize);
    if length > LOCATION_BYTES_MAX {
        return Ok(None);
    }
    let mut object = ObjectId::default();
    object.copy_from_slice(&entry[8..24]);
    entry.resize(HEAD_BYTES + length, 0);
    if !fill(reader, &mut entry[HEAD_BYTES..])? || checksum != xxh3_64_with_seed(&entry[8..], SEED)
    {
        return Ok(None);
    }
    let location = str::from_utf8(&entry[HEAD_BYTES..]).ok().and_then(|it| Path::parse(it).ok());
    Ok(location.map(|location| (object, location, entry.len() as u64)))
}

/// Fills a buffer. Returns `false` at the end of the file.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(number: u8) -> (ObjectId, Path) {
        ([number; 16], Path::from(format!("folder/object {number}")))
    }

    #[test]
    fn names_are_read_as_they_were_written_up_to_the_first_damage() {
        let directory = tempfile::tempdir().unwrap();
        let (mut names, found) = Names::open(directory.path()).unwrap();
        assert!(found.is_empty());
        for number in 0..10 {
            let (id, location) = object(number);
            assert!(!names.add(&id, &location).unwrap());
        }
        let (_, found) = Names::open(directory.path()).unwrap();
        assert_eq!(found, (0..10).map(object).collect());
        let entry = encode(&object(1).0, &object(1).1).len();
        for position in 3 * entry..4 * entry {
            let byte = [0];
            let mut before = [0];
            names.file.read_exact_at(&mut before, position as u64).unwrap();
            if before == byte {
                continue;
            }
            names.file.write_all_at(&byte, position as u64).unwrap();
            let (_, found) = Names::open(directory.path()).unwrap();
            assert_eq!(found, (0..3).map(object).collect(), "byte {position}");
            names.file.write_all_at(&before, position as u64).unwrap();
        }
        // A cut entry.
        names.file.set_len(5 * entry as u64 - 1).unwrap();
        let (mut names, found) = Names::open(directory.path()).unwrap();
        assert_eq!(found, (0..4).map(object).collect());
        names.add(&object(9).0, &object(9).1).unwrap();
        let (_, found) = Names::open(directory.path()).unwrap();
        assert_eq!(found, [0, 1, 2, 3, 9].map(object).into());
    }

    #[test]
    fn a_file_that_has_grown_is_rewritten() {
        let directory = tempfile::tempdir().unwrap();
        let (mut names, _) = Names::open(directory.path()).unwrap();
        let (id, location) = object(7);
        let mut added = 0;
        while !names.add(&id, &location).unwrap() {
            added += 1;
        }
        let entry = encode(&id, &location).len() as u64;
        assert_eq!(added, GROWTH_BYTES / entry);
        names.rewrite([object(7), object(8)]).unwrap();
        names.add(&object(9).0, &object(9).1).unwrap();
        let (names, found) = Names::open(directory.path()).unwrap();
        assert_eq!(found, [7, 8, 9].map(object).into());
        assert_eq!(names.length_bytes, 3 * entry);
    }
}
