//! Serves random records of a file, the first ones more often than the others, and starts warm:
//! what was in memory at the end of the last run is read again in the background.
//!
//! `cargo run --release --example warm_start -p bifolio -- FILE LIST` (twice)

use bifolio::{Access, Cache, OpenOptions};
use std::time::{Duration, Instant};

const SECONDS: u64 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: warm_start FILE LIST");
    let (path, list) = (next()?, next()?);
    let cache = Cache::builder().memory(64 << 20).build()?;
    let file = cache.open(&path, &OpenOptions::new())?;
    file.set_access(Access::Random);
    let restore = match cache.restore_hot(&list) {
        Ok(restore) => Some(restore),
        Err(error) => {
            println!("a cold start: {error}");
            None
        }
    };

    let records = (file.len() / 64).max(1);
    let (mut record, mut number) = ([0; 64], 0_u64);
    for second in 1..=SECONDS {
        let (begun, before) = (Instant::now(), cache.stats());
        let mut served = 0;
        while begun.elapsed() < Duration::from_secs(1) {
            number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
            // The cube of a number from 0 to 1: half of all are in the first eighth.
            let part = (number >> 32) as f64 / f64::from(u32::MAX);
            let position = (part * part * part * records as f64) as u64 % records * 64;
            served += u64::from(file.read_at(&mut record, position)? > 0);
        }
        let ratio = cache.stats().since(&before).hit_ratio().unwrap_or(1.0);
        println!("second {second}: {served} records, {:.2} % hits", 100.0 * ratio);
    }
    if let Some(restore) = restore {
        println!("{:?}", restore.progress());
    }
    println!("{:?}", cache.save_hot(&list)?);
    Ok(())
}
