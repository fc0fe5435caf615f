//! A file over storage of your own: here a vector, elsewhere an object store or a test double.
//!
//! `cargo run --example custom_backing -p bifolio`

use bifolio::backing::{Backing, DirectBacking, FileIdentity, IoBuf, IoBufMut};
use bifolio::{Cache, OpenOptions};
use std::io;
use std::sync::{Arc, Mutex};

#[derive(Debug, Default)]
struct VectorBacking(Mutex<Vec<u8>>);

impl Backing for VectorBacking {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let bytes = self.0.lock().unwrap();
        let rest = bytes.get(position_bytes as usize..).unwrap_or_default();
        let count = rest.len().min(target.len());
        target.copy_from_slice(0, &rest[..count]);
        Ok(count)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let mut bytes = self.0.lock().unwrap();
        let end = position_bytes as usize + source.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        source.copy_to_slice(0, &mut bytes[position_bytes as usize..end]);
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.0.lock().unwrap().resize(length_bytes as usize, 0);
        Ok(())
    }

    fn describe(&self) -> String {
        "a vector".into()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

/// The identity of the vector: a second open shares the pages of the first one.
impl DirectBacking for VectorBacking {
    fn identity(&self) -> Option<FileIdentity> {
        Some(FileIdentity::custom(1, 1))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let storage = Arc::new(VectorBacking::default());
    let cache = Cache::builder().memory(1 << 20).build()?;
    let options = OpenOptions::new().write(true);
    let file = cache.open_backing(storage.clone(), &options)?;

    file.write_all_at(b"kept in memory", 0)?;
    assert!(storage.0.lock().unwrap().is_empty(), "not written out before it must be");
    file.sync_data()?;
    assert_eq!(&storage.0.lock().unwrap()[..], b"kept in memory");

    let again = cache.open_backing(storage, &options)?;
    again.write_all_at(b"KEPT", 0)?;
    let mut bytes = [0; 14];
    file.read_exact_at(&mut bytes, 0)?;
    assert_eq!(&bytes, b"KEPT in memory");
    println!("the vector holds {} bytes now", file.len());
    Ok(())
}
