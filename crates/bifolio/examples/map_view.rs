//! Files as memory: sums the records of a file larger than the cache, and counts in scratch space
//! larger than the cache.
//!
//! `cargo run --release --example map_view -p bifolio`
//!
//! # Safety
//! Only this program uses the two files, and it truncates neither. Slices of a map are dropped
//! before the map is written or dropped.
#![allow(unsafe_code)]

use bifolio::{Cache, File, OpenOptions};

const MEMORY: u64 = 4 << 20;
const RECORDS: u64 = 2 << 20;
const STRETCH_BYTES: u64 = 256 << 10;
const COUNTERS: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let features = bifolio::features();
    let missing = features.iter().find(|report| report.name == "user-faults");
    if let Some(report) = missing.filter(|report| !report.available) {
        println!("files cannot be mapped here: {}", report.reason);
        return Ok(());
    }
    // 4 MiB of memory for 16 MiB of records and 8 MiB of counters.
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("records");
    let records: Vec<u8> = (0..RECORDS).flat_map(u64::to_le_bytes).collect();
    std::fs::write(&path, records)?;
    let cache = Cache::builder().memory(MEMORY).swap_directory(directory.path()).build()?;

    let file = cache.open(&path, &OpenOptions::new().mappable(true))?;
    let sum = sum_of(&file)?;
    assert_eq!(sum, RECORDS * (RECORDS - 1) / 2);
    println!("{RECORDS} records, {} bytes: their sum is {sum}", file.len());

    let options = OpenOptions::new().read(true).write(true).mappable(true);
    let scratch = cache.memory_file_with("counters", &options)?;
    let hits = count_in(&scratch)?;
    println!("{COUNTERS} counters, {} bytes: {hits} hits in all", scratch.len());

    let stats = cache.stats();
    let (in_pages, faults) = (stats.maps.installed_pages, stats.maps.faults);
    println!("{in_pages} pages came in, {faults} of them by faults");
    println!(
        "{} pages were evicted, {} swapped",
        stats.maps.unmapped_pages, stats.storage.swapped_out_pages
    );
    println!("{} of {} bytes are in use", stats.memory.used_bytes, stats.memory.bound_bytes);
    Ok(())
}

/// Looks at a file stretch by stretch: what cannot be read is an error here, and no signal.
fn sum_of(file: &File) -> bifolio::Result<u64> {
    let map = file.map(0..file.len())?;
    let mut sum = 0;
    for start in (0..map.len()).step_by(STRETCH_BYTES as usize) {
        let end = map.len().min(start + STRETCH_BYTES);
        map.populate(start..end)?;
        // SAFETY: see the head of the file.
        let bytes = unsafe { map.as_slice() };
        let (words, _) = bytes[start as usize..end as usize].as_chunks();
        sum += words.iter().map(|word| u64::from_le_bytes(*word)).sum::<u64>();
    }
    Ok(sum)
}

/// Counts in a memory file as in an array. What does not fit into memory is swapped out, and comes
/// back when it is touched again.
fn count_in(scratch: &File) -> bifolio::Result<u64> {
    scratch.set_len(8 * COUNTERS)?;
    let mut map = scratch.map_mut(0..scratch.len())?;
    // SAFETY: see the head of the file.
    let bytes = unsafe { map.as_mut_slice() };
    let (counters, _) = bytes.as_chunks_mut();
    for hit in 0..4 * COUNTERS {
        // A few neighbours for a while, and through all of it in the end.
        let counter = &mut counters[((hit / 4) ^ (hit & 31)) as usize];
        *counter = (u64::from_le_bytes(*counter) + 1).to_le_bytes();
    }
    Ok(counters.iter().map(|counter| u64::from_le_bytes(*counter)).sum())
}
