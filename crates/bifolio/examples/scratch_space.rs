//! Scratch space that may be larger than memory: sorted runs in a memory file, merged from there.

use bifolio::Cache;

const RUNS: u64 = 16;
const RUN_WORDS: usize = 128 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // 4 MiB of memory for 16 MiB of runs: the rest goes to a temporary file, and comes back.
    let cache = Cache::builder().memory(4 << 20).swap_directory(std::env::temp_dir()).build()?;
    let runs = cache.memory_file("sorted runs")?;
    let run_bytes = 8 * RUN_WORDS as u64;
    let mut word = 1_u64;
    for run in 0..RUNS {
        let mut words: Vec<u64> = (0..RUN_WORDS)
            .map(|_| {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                word
            })
            .collect();
        words.sort_unstable();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        runs.write_all_at(&bytes, run * run_bytes)?;
    }

    let head = |run: u64, at: u64| -> bifolio::Result<u64> {
        let mut bytes = [0; 8];
        runs.read_exact_at(&mut bytes, run * run_bytes + at * 8)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let mut merge = std::collections::BinaryHeap::new();
    for run in 0..RUNS {
        merge.push(std::cmp::Reverse((head(run, 0)?, run, 0)));
    }
    let (mut count, mut last) = (0_u64, 0);
    while let Some(std::cmp::Reverse((word, run, at))) = merge.pop() {
        assert!(word >= last, "merged in order");
        (last, count) = (word, count + 1);
        if at + 1 < RUN_WORDS as u64 {
            merge.push(std::cmp::Reverse((head(run, at + 1)?, run, at + 1)));
        }
    }
    let stats = cache.stats();
    println!("{count} words in order; {} pages were swapped", stats.storage.swapped_out_pages);
    Ok(())
}
