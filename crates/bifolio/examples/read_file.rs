//! Serves random records of a file through a small cache and prints what the cache did.
//!
//! `cargo run --release --example read_file -p bifolio -- FILE`

use bifolio::{Cache, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: read_file FILE")?;
    let cache = Cache::builder().memory(16 << 20).build()?;
    let file = cache.open(&path, &OpenOptions::new())?;

    let records = (file.len() / 64).max(1);
    let mut record = [0; 64];
    let mut sum = 0_u64;
    for i in 0..100_000_u64 {
        let position = i.wrapping_mul(0x9E37_79B9_7F4A_7C15) % records * 64;
        let count = file.read_at(&mut record, position)?;
        sum += record[..count].iter().map(|byte| u64::from(*byte)).sum::<u64>();
    }

    let stats = cache.stats();
    println!("checksum {sum}");
    for (name, count) in stats.counts() {
        if count > 0 {
            println!("{name:>24} {count}");
        }
    }
    println!("{:>24} {} of {} bytes", "used", stats.memory.used_bytes, stats.memory.bound_bytes);
    Ok(())
}
