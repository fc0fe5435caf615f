//! Models of eviction policies: each decides which of at most `capacity` pages are in memory.
//!
//! A model is the policy without memory, threads or I/O, so it can be read beside its paper. Each
//! function returns one in operation: it uses a page, which is in memory afterwards, and returns
//! `true` if the page was in memory before. The policy of the library is no model here: it is
//! measured.

use std::collections::BinaryHeap;
use std::mem::take;

use super::queues::Queues;

/// The policy that all others are divided by.
pub(super) const LRU: &str = "lru";
/// The policy that knows the future.
pub(super) const BELADY: &str = "belady";

/// The policies, by the names of their series.
pub(super) const POLICIES: [&str; 8] =
    [LRU, "clock", "sieve", "s3_fifo", "clock2q_plus", "arc", "lirs", BELADY];

/// Returns the number of misses of `policy` with room for `capacity` pages, of a trace of pages
/// below `pages`.
pub(super) fn misses(policy: &str, capacity: usize, pages: usize, trace: &[u32]) -> u64 {
    let capacity = capacity.max(2);
    let count = |model: &mut dyn FnMut(u32) -> bool| {
        trace.iter().map(|page| u64::from(!model(*page))).sum()
    };
    match policy {
        LRU => count(&mut lru(capacity, pages)),
        "clock" => count(&mut clock(capacity, pages)),
        "sieve" => count(&mut sieve(capacity, pages)),
        "s3_fifo" => count(&mut s3_fifo(capacity, pages)),
        "clock2q_plus" => count(&mut clock2q_plus(capacity, pages)),
        "arc" => count(&mut arc(capacity, pages)),
        "lirs" => count(&mut lirs(capacity, pages)),
        BELADY => count(&mut belady(capacity, pages, trace)),
        _ => unreachable!("no model is called {policy}"),
    }
}

/// Least recently used: one list, a hit moves the page to its head.
fn lru(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    let mut queue = Queues::<1>::new(pages);
    move |page| {
        let hit = queue.is_in(0, page);
        if !hit && queue.len(0) == capacity {
            queue.pop(0);
        }
        queue.push(0, page);
        hit
    }
}

/// CLOCK: a queue of pages with one bit each. A hit sets the bit; the hand clears it and goes on.
/// The queue turns under the hand: its oldest page is where the hand points.
///
/// Corbato, A Paging Experiment with the Multics System (1969).
fn clock(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    let (mut queue, mut used) = (Queues::<1>::new(pages), vec![false; pages]);
    move |page| {
        if queue.is_in(0, page) {
            used[page as usize] = true;
            return true;
        }
        while queue.len(0) == capacity {
            let Some(candidate) = queue.pop(0) else { break };
            if take(&mut used[candidate as usize]) {
                queue.push(0, candidate);
            }
        }
        queue.push(0, page);
        false
    }
}

/// SIEVE: CLOCK whose hand leaves the survivors in their places, so that new pages are sifted.
///
/// Zhang and others, SIEVE is Simpler than LRU (NSDI 2024).
fn sieve(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    let (mut queue, mut used) = (Queues::<1>::new(pages), vec![false; pages]);
    let mut hand = None;
    move |page| {
        if queue.is_in(0, page) {
            used[page as usize] = true;
            return true;
        }
        while queue.len(0) == capacity {
            let Some(candidate) = hand.or_else(|| queue.oldest(0)) else { break };
            hand = queue.newer(candidate);
            if !take(&mut used[candidate as usize]) {
                queue.remove(candidate);
            }
        }
        queue.push(0, page);
        false
    }
}

/// The queues of S3-FIFO and Clock2Q+: of new pages, of the others, and of pages evicted from the
/// first, of which only the number is known.
const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

/// Returns the queue that S3-FIFO and Clock2Q+ evict from, with `small` pages for the new ones.
fn list_to_evict(queues: &Queues<3>, small: usize) -> usize {
    if queues.len(SMALL) >= small || queues.len(MAIN) == 0 { SMALL } else { MAIN }
}

/// S3-FIFO: a small queue, whose pages move on to the main one if they were hit twice, and a list
/// of the pages that were evicted from the small queue.
///
/// Yang and others, FIFO Queues Are All You Need for Cache Eviction (SOSP 2023).
fn s3_fifo(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    const HITS_MAX: u8 = 3;
    let (mut queues, mut hits) = (Queues::<3>::new(pages), vec![0_u8; pages]);
    let small = (capacity / 10).max(1);
    move |page| {
        let was_in = queues.list_of(page);
        let hits_of_page = &mut hits[page as usize];
        if matches!(was_in, Some(SMALL | MAIN)) {
            *hits_of_page = (*hits_of_page + 1).min(HITS_MAX);
            return true;
        }
        *hits_of_page = 0;
        while queues.len(SMALL) + queues.len(MAIN) == capacity {
            let list = list_to_evict(&queues, small);
            let Some(candidate) = queues.pop(list) else { break };
            let hits = &mut hits[candidate as usize];
            if list == SMALL && *hits > 1 {
                *hits = 0;
                queues.push(MAIN, candidate);
            } else if list == SMALL {
                queues.push(GHOST, candidate);
                if queues.len(GHOST) > capacity - small {
                    queues.pop(GHOST);
                }
            } else if *hits > 0 {
                *hits -= 1;
                queues.push(MAIN, candidate);
            }
        }
        queues.push(if was_in == Some(GHOST) { MAIN } else { SMALL }, page);
        false
    }
}

/// Clock2Q+: a small queue, a main CLOCK, and a list of pages evicted from the small queue. Hits
/// in the first half of the small queue do not count: they are correlated with the miss.
///
/// Yang and others, Clock2Q+: A Simple and Efficient Replacement Algorithm for Metadata Cache
/// (2025).
fn clock2q_plus(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    let (mut queues, mut used) = (Queues::<3>::new(pages), vec![false; pages]);
    // Number of pages added to the small queue, in all and before each page.
    let (mut adds, mut added) = (0, vec![0; pages]);
    let small = (capacity / 10).max(1);
    move |page| {
        let (index, was_in) = (page as usize, queues.list_of(page));
        if matches!(was_in, Some(SMALL | MAIN)) {
            let is_correlated = adds - added[index] <= small / 2;
            used[index] |= was_in == Some(MAIN) || !is_correlated;
            return true;
        }
        used[index] = false;
        while queues.len(SMALL) + queues.len(MAIN) == capacity {
            let list = list_to_evict(&queues, small);
            let Some(candidate) = queues.pop(list) else { break };
            if take(&mut used[candidate as usize]) {
                queues.push(MAIN, candidate);
            } else if list == SMALL {
                queues.push(GHOST, candidate);
                if queues.len(GHOST) > capacity / 2 {
                    queues.pop(GHOST);
                }
            }
        }
        if was_in == Some(GHOST) {
            queues.push(MAIN, page);
        } else {
            queues.push(SMALL, page);
            added[index] = adds;
            adds += 1;
        }
        false
    }
}

/// ARC: pages used once and pages used again, each in an LRU list, with a list of evicted pages
/// behind each; a hit in one of those enlarges the part of memory that would have kept the page.
///
/// Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003).
fn arc(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    const ONCE: usize = 0;
    const AGAIN: usize = 1;
    const ONCE_EVICTED: usize = 2;
    const AGAIN_EVICTED: usize = 3;
    let (mut queues, mut once_target) = (Queues::<4>::new(pages), 0_usize);
    move |page| {
        let was_in = queues.list_of(page);
        let [once, again, once_evicted, again_evicted] =
            [ONCE, AGAIN, ONCE_EVICTED, AGAIN_EVICTED].map(|list| queues.len(list));
        match was_in {
            Some(ONCE | AGAIN) => {
                queues.push(AGAIN, page);
                return true;
            }
            Some(ONCE_EVICTED) => {
                let step = (again_evicted / once_evicted).max(1);
                once_target = (once_target + step).min(capacity);
            }
            Some(_) => {
                let step = (once_evicted / again_evicted).max(1);
                once_target = once_target.saturating_sub(step);
            }
            None if once + once_evicted >= capacity => {
                let _ = queues.pop(ONCE_EVICTED).or_else(|| queues.pop(ONCE));
            }
            None if once + again + once_evicted + again_evicted >= 2 * capacity => {
                queues.pop(AGAIN_EVICTED);
            }
            None => {}
        }
        // Evicts a page if memory is full.
        let once = queues.len(ONCE);
        if once + queues.len(AGAIN) >= capacity {
            let is_over =
                once > once_target || was_in == Some(AGAIN_EVICTED) && once == once_target;
            let list = if once > 0 && is_over { ONCE } else { AGAIN };
            if let Some(victim) = queues.pop(list) {
                queues.push(if list == ONCE { ONCE_EVICTED } else { AGAIN_EVICTED }, victim);
            }
        }
        queues.push(if was_in.is_some() { AGAIN } else { ONCE }, page);
        false
    }
}

/// LIRS: a page stays if the time between its last two uses is short compared with the others.
///
/// The recency list has the pages in the order of their last use, down to the oldest one with a
/// short distance. A page that is used again while it is in that list has a short distance. Pages
/// with a long one share a hundredth of memory.
///
/// Jiang and Zhang, LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy
/// (SIGMETRICS 2002).
fn lirs(capacity: usize, pages: usize) -> impl FnMut(u32) -> bool {
    // The lists of pages with a long distance: in memory, and in the recency list only.
    const RESIDENT: usize = 0;
    const EVICTED: usize = 1;
    let (mut recency, mut long) = (Queues::<1>::new(pages), Queues::<2>::new(pages));
    let (mut is_short, mut shorts) = (vec![false; pages], 0);
    let shorts_max = capacity.saturating_sub((capacity / 100).max(1)).max(1);
    move |page| {
        let hit = is_short[page as usize] || long.is_in(RESIDENT, page);
        if is_short[page as usize] {
            recency.push(0, page);
        } else {
            if !hit
                && shorts + long.len(RESIDENT) >= capacity
                && let Some(victim) = long.pop(RESIDENT)
            {
                if recency.is_in(0, victim) {
                    long.push(EVICTED, victim);
                }
                if long.len(EVICTED) > 2 * capacity
                    && let Some(forgotten) = long.pop(EVICTED)
                {
                    recency.remove(forgotten);
                }
            }
            let becomes_short = recency.is_in(0, page) || shorts < shorts_max;
            recency.push(0, page);
            if !becomes_short {
                long.push(RESIDENT, page);
                return hit;
            }
            long.remove(page);
            is_short[page as usize] = true;
            shorts += 1;
            if shorts > shorts_max
                && let Some(oldest) = recency.pop(0)
            {
                is_short[oldest as usize] = false;
                shorts -= 1;
                long.push(RESIDENT, oldest);
            }
        }
        // The old end of the recency list is a page with a short distance.
        while let Some(oldest) = recency.oldest(0).filter(|page| !is_short[*page as usize]) {
            recency.remove(oldest);
            if long.is_in(EVICTED, oldest) {
                long.remove(oldest);
            }
        }
        hit
    }
}

/// Belady's policy: evicts the page whose next use is farthest in the future. No policy has fewer
/// misses; only a replay knows the future.
///
/// Belady, A Study of Replacement Algorithms for a Virtual-Storage Computer (1966).
fn belady(capacity: usize, pages: usize, trace: &[u32]) -> impl FnMut(u32) -> bool + use<> {
    const NEVER: u32 = u32::MAX;
    let mut next_uses = vec![NEVER; trace.len()];
    let mut next_of_page = vec![NEVER; pages];
    for (index, page) in trace.iter().enumerate().rev() {
        next_uses[index] = std::mem::replace(&mut next_of_page[*page as usize], index as u32);
    }
    let mut next_uses = next_uses.into_iter();
    // Next use of each resident page.
    let (mut next_of, mut resident) = (vec![None; pages], 0);
    // An entry is stale if the page has another next use, or is not resident.
    let mut by_next_use = BinaryHeap::new();
    move |page| {
        let next_use = next_uses.next().unwrap_or(NEVER);
        let hit = next_of[page as usize].is_some();
        while !hit
            && resident == capacity
            && let Some((next_use, page)) = by_next_use.pop()
        {
            if next_of[page as usize] == Some(next_use) {
                next_of[page as usize] = None;
                resident -= 1;
            }
        }
        resident += usize::from(!hit);
        next_of[page as usize] = Some(next_use);
        by_next_use.push((next_use, page));
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model that kept more pages than its capacity would have fewer.
    #[test]
    fn no_policy_has_fewer_misses_than_belady() {
        let mut random = fastrand::Rng::with_seed(1);
        let skewed = |_| random.u32(0..1000).min(random.u32(0..1000)).min(random.u32(0..1000));
        let trace: Vec<u32> = (0..30_000).map(skewed).collect();
        for capacity in [50, 100, 400] {
            let of = |name| misses(name, capacity, 1000, &trace);
            for name in POLICIES {
                assert!(of(name) >= of(BELADY), "{name}");
                assert!(of(name) as f64 <= of(LRU) as f64 * 1.05, "{name} with {capacity}");
            }
        }
    }
}
