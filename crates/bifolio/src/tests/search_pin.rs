//! An exhaustive search of the pin word: every interleaving of some threads on a word of a few
//! bits.
//!
//! All changes of a pin word are read-modify-writes (or stores of its sole owner) of one word, so
//! its integer properties are exact under plain interleaving. Here the threads are step machines of
//! `page/pin_word.rs`, one atomic operation per step, which choose freely what to do next; the word
//! is narrow, so that overflows are reachable; the search is breadth first over all states.
//! [`Layout`] mirrors the decisions of `PinState` for any width; a test checks that the two agree.
//!
//! Each rule is also searched with a wrong step ([`Variant`]): the search must find the violation.
//! Memory ordering is not covered here but in `loom_pin`.

use crate::page::{COUNT_MAX, PinState, PinWord, Put, TryGet};
use std::collections::HashMap;

/// Where the fields of a word are.
#[derive(Clone, Copy, Debug)]
struct Layout {
    count_bits: u32,
    generation_bits: u32,
}

/// The layout of `page/pin_word.rs`.
const REAL: Layout = Layout { count_bits: 39, generation_bits: 24 };

/// `PinState`, for any width.
impl Layout {
    fn frozen_bit(self) -> u64 {
        1 << self.count_bits
    }

    fn count_mask(self) -> u64 {
        self.frozen_bit() - 1
    }

    fn count_max(self) -> u64 {
        self.count_mask() >> 1
    }

    fn live(self, generation: u64, count: u64) -> u64 {
        (generation << (self.count_bits + 1)) | count
    }

    fn frozen(self, generation: u64) -> u64 {
        self.live(generation, 0) | self.frozen_bit()
    }

    fn generation(self, word: u64) -> u64 {
        word >> (self.count_bits + 1)
    }

    fn next_generation(self, word: u64) -> u64 {
        (self.generation(word) + 1) & ((1 << self.generation_bits) - 1)
    }

    fn is_frozen(self, word: u64) -> bool {
        word & self.frozen_bit() != 0
    }

    /// Returns the count field, also while frozen.
    fn field(self, word: u64) -> u64 {
        word & self.count_mask()
    }

    fn is_got(self, word: u64) -> bool {
        word & (self.frozen_bit() | (self.count_max() + 1)) == 0
    }

    fn wiped(self, word: u64, generation: u64) -> Option<u64> {
        let clean = self.frozen(generation);
        let excess = self.is_frozen(word) && self.generation(word) == generation && word != clean;
        excess.then_some(clean)
    }

    /// Returns `word + change`, wrapping at the width of the word.
    fn add(self, word: u64, change: i64) -> u64 {
        let bits = self.count_bits + 1 + self.generation_bits;
        word.wrapping_add_signed(change) & (u64::MAX >> (u64::BITS - bits))
    }
}

/// The protocol, or the protocol with one wrong step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Ours,
    /// A failed get tries to wipe once, as the kernel's first proposal did.
    WipesOnce,
    /// A failed get subtracts what it added.
    Subtracts,
    /// A failed get stores the clean word.
    WipesByStore,
    /// The put that reaches 0 frees without the CAS.
    FreesWithoutCas,
    /// `init` keeps the generation.
    KeepsGeneration,
}

/// Position of a thread between two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Idle,
    /// PIN-A3 is next: a failed get of `references`, which last loaded `current`.
    Wiping {
        current: u64,
        generation: u64,
        references: u64,
    },
    /// A get over the limit, about to put its references.
    Refused {
        references: u64,
    },
    /// PIN-A5 is next, in the generation of the put.
    Staged {
        generation: u64,
        use_number: u64,
    },
    /// PIN-B1 is next.
    Freezing {
        wanted: u64,
    },
}

/// State of the thread that froze a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    /// It may unfreeze with this many references.
    Froze(u64),
    /// The folio is free, and the thread its allocator.
    Freed,
    /// It freed the folio by a put of an earlier generation.
    FreedLater,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Thread {
    step: Step,
    held: u64,
    owner: Option<Owner>,
}

const IDLE: Thread = Thread { step: Step::Idle, held: 0, owner: None };
const FREED: Thread = Thread { owner: Some(Owner::Freed), ..IDLE };

fn holding(held: u64) -> Thread {
    Thread { held, ..IDLE }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SearchState<const N: usize> {
    word: u64,
    threads: [Thread; N],
    /// Generations begun since the start.
    uses: u64,
}

/// Parameters of a search: what the threads may do, and for how long.
#[derive(Clone, Copy, Debug)]
struct Search {
    layout: Layout,
    variant: Variant,
    /// Maximum number of references of one get or put.
    references_max: u64,
    /// Maximum number of references that a thread holds.
    held_max: u64,
    /// Maximum number of generations begun.
    uses_max: u64,
    /// Threads below this one do nothing: they keep their references.
    passive: usize,
}

impl Search {
    /// Returns all states that one step of `thread` leads to.
    fn steps<const N: usize>(&self, state: &SearchState<N>, thread: usize) -> Vec<SearchState<N>> {
        let layout = self.layout;
        let word = state.word;
        let mut next = Vec::new();
        let now = state.threads[thread];
        let mut push = |word: u64, changed: Thread, begun: u64| {
            let mut state = SearchState { word, uses: state.uses + begun, ..*state };
            state.threads[thread] = changed;
            next.push(state);
        };
        let idle = Thread { step: Step::Idle, ..now };
        match (now.step, now.owner) {
            (Step::Idle, Some(Owner::Freed | Owner::FreedLater)) => {
                if state.uses < self.uses_max {
                    let generation = match self.variant {
                        Variant::KeepsGeneration => layout.generation(word),
                        _ => layout.next_generation(word),
                    };
                    push(layout.live(generation, 1), holding(1), 1);
                }
            }
            (Step::Idle, Some(Owner::Froze(references))) => {
                let unfrozen = layout.live(layout.generation(word), references);
                push(unfrozen, holding(references), 0);
                push(word, FREED, 0);
            }
            (Step::Idle, None) => {
                for references in 1..=self.references_max {
                    if now.held + references <= self.held_max {
                        let (word, changed) = self.get(word, now, references);
                        push(word, changed, 0);
                    }
                    if now.held >= references {
                        let (word, changed) = self.put(state, now, references);
                        push(word, changed, 0);
                    }
                }
                let wanted = layout.live(layout.generation(word), now.held);
                if now.held > 0 && word == wanted {
                    push(word, Thread { step: Step::Freezing { wanted }, ..now }, 0);
                }
            }
            (Step::Freezing { wanted }, _) if word == wanted => {
                let owner = Some(Owner::Froze(now.held));
                push(layout.frozen(layout.generation(word)), Thread { owner, ..IDLE }, 0);
            }
            (Step::Freezing { .. }, _) => push(word, idle, 0),
            (Step::Staged { generation, use_number }, _) => {
                let wins =
                    word == layout.live(generation, 0) || self.variant == Variant::FreesWithoutCas;
                let owner = if use_number == state.uses { Owner::Freed } else { Owner::FreedLater };
                if wins {
                    push(layout.frozen(generation), Thread { owner: Some(owner), ..IDLE }, 0);
                } else {
                    push(word, idle, 0);
                }
            }
            (Step::Refused { references }, _) => {
                let held = Thread { held: now.held + references, ..idle };
                let (word, changed) = self.put(state, held, references);
                push(word, changed, 0);
            }
            (Step::Wiping { current, generation, references }, _) => {
                let (word, step) = self.wipe(word, current, generation, references);
                push(word, Thread { step, ..now }, 0);
            }
        }
        next
    }

    /// Does PIN-A1 and PIN-A2.
    fn get(&self, word: u64, now: Thread, references: u64) -> (u64, Thread) {
        let after = self.layout.add(word, references as i64);
        if self.layout.is_got(after) {
            return (after, Thread { held: now.held + references, ..now });
        }
        let generation = self.layout.generation(after);
        let step = match self.layout.is_frozen(after) {
            true => Step::Wiping { current: after, generation, references },
            false => Step::Refused { references },
        };
        (after, Thread { step, ..now })
    }

    /// Does PIN-A4.
    fn put<const N: usize>(
        &self,
        state: &SearchState<N>,
        now: Thread,
        references: u64,
    ) -> (u64, Thread) {
        let word = state.word;
        let generation = self.layout.generation(word);
        let last = self.layout.field(word) == references;
        let staged = Step::Staged { generation, use_number: state.uses };
        let step = if last { staged } else { Step::Idle };
        let after = self.layout.add(word, -(references as i64));
        (after, Thread { step, held: now.held - references, ..now })
    }

    /// Does one round of PIN-A3.
    fn wipe(&self, word: u64, current: u64, generation: u64, references: u64) -> (u64, Step) {
        let layout = self.layout;
        let clean = layout.frozen(generation);
        match self.variant {
            Variant::Subtracts => (layout.add(word, -(references as i64)), Step::Idle),
            Variant::WipesByStore => (clean, Step::Idle),
            _ if word == current => (clean, Step::Idle),
            Variant::WipesOnce => (word, Step::Idle),
            _ if layout.wiped(word, generation).is_none() => (word, Step::Idle),
            _ => (word, Step::Wiping { current: word, generation, references }),
        }
    }

    /// Returns the rule that a state violates.
    fn broken<const N: usize>(&self, state: &SearchState<N>) -> Option<&'static str> {
        let threads = &state.threads;
        let held: u64 = threads.iter().map(|thread| thread.held).sum();
        let owners = threads.iter().filter(|thread| thread.owner.is_some()).count();
        let returning = threads.iter().map(|thread| match thread.step {
            Step::Refused { references } => references,
            _ => 0,
        });
        let field = self.layout.field(state.word);
        let getters = (N - self.passive) as u64;
        let frozen = self.layout.is_frozen(state.word);
        let later = threads.iter().any(|thread| thread.owner == Some(Owner::FreedLater));
        let rules = [
            (!later, "R8: freed by a put of an earlier generation"),
            (owners <= 1, "PIN-1: two threads own the folio"),
            (owners == 0 || frozen, "PIN-3: FROZEN is lost"),
            (owners == 1 || !frozen, "frozen without an owner"),
            (!frozen || held == 0, "PIN-4: references to a frozen folio"),
            (!frozen || field <= getters * self.references_max, "more excess than getters"),
            (frozen || field == held + returning.sum::<u64>(), "PIN-2: the count is not exact"),
            (held <= self.layout.count_max(), "PIN-5: more references than the limit"),
        ];
        rules.into_iter().find_map(|(holds, rule)| (!holds).then_some(rule))
    }

    /// Visits all states. Returns their number, or the steps to one that violates a rule.
    fn run<const N: usize>(&self, first: SearchState<N>) -> Result<usize, String> {
        let mut came_from = HashMap::from([(first, first)]);
        let mut frontier = vec![first];
        while !frontier.is_empty() {
            let mut reached = Vec::new();
            for state in frontier {
                if let Some(rule) = self.broken(&state) {
                    return Err(format!("{rule}:\n{}", way(&came_from, state)));
                }
                for thread in self.passive..N {
                    for next in self.steps(&state, thread) {
                        came_from.entry(next).or_insert_with(|| {
                            reached.push(next);
                            state
                        });
                    }
                }
            }
            frontier = reached;
        }
        Ok(came_from.len())
    }
}

fn way<const N: usize>(
    came_from: &HashMap<SearchState<N>, SearchState<N>>,
    last: SearchState<N>,
) -> String {
    let before = came_from[&last];
    let so_far = if before == last { String::new() } else { way(came_from, before) };
    format!("{so_far}{:#010b} {:?}\n", last.word, last.threads)
}

/// Returns a search with getters that keep asking for a frozen folio, which `passive` thread 0 owns
/// (R9).
fn getters(count_bits: u32, references_max: u64, variant: Variant) -> Search {
    let layout = Layout { count_bits, generation_bits: 1 };
    let held_max = references_max;
    Search { layout, variant, references_max, held_max, uses_max: 0, passive: 1 }
}

fn run_getters<const N: usize>(search: Search) -> Result<usize, String> {
    let mut threads = [IDLE; N];
    threads[0] = FREED;
    search.run(SearchState { word: search.layout.frozen(0), threads, uses: 0 })
}

/// Runs three threads that get, put, freeze, unfreeze, free and begin generations at will.
fn run_free(variant: Variant, generation_bits: u32, uses_max: u64) -> Result<usize, String> {
    let layout = Layout { count_bits: 4, generation_bits };
    let search = Search { layout, variant, references_max: 2, held_max: 2, uses_max, passive: 0 };
    let threads = [holding(1), holding(1), IDLE];
    search.run(SearchState { word: layout.live(0, 2), threads, uses: 0 })
}

/// R9: however many gets fail, FROZEN stays, and the excess is at most one get per thread.
#[test]
fn search_r9_failed_gets_never_unfreeze() {
    for count_bits in 3..=6 {
        for references_max in 1..=3 {
            let search = getters(count_bits, references_max, Variant::Ours);
            let fits = |threads: u64| threads * references_max <= search.layout.count_mask();
            if fits(2) {
                assert!(run_getters::<3>(search).unwrap() > 10);
            }
            if fits(3) && count_bits <= 5 {
                assert!(run_getters::<4>(search).unwrap() > 100);
            }
        }
    }
}

/// R9, converse: with a single try to wipe, as in the kernel's first proposal, two getters carry
/// the count through FROZEN. So the loop is needed, and the search can fail.
#[test]
fn search_r9_wiping_once_loses_frozen() {
    for count_bits in 3..=5 {
        for references_max in 1..=3 {
            let search = getters(count_bits, references_max, Variant::WipesOnce);
            let found = run_getters::<3>(search).unwrap_err();
            // The bound is violated first; without the bound, FROZEN itself is lost.
            assert!(found.starts_with("more excess than getters"), "{found}");
            let unbounded = Search { passive: 0, ..search };
            assert!(lost_frozen(unbounded), "{count_bits} bits, {references_max}");
        }
    }
}

/// Returns `true` if two getters reach a word without FROZEN, whatever the excess on the way.
fn lost_frozen(search: Search) -> bool {
    let first = SearchState { word: search.layout.frozen(0), threads: [IDLE; 2], uses: 0 };
    let mut seen = HashMap::from([(first, ())]);
    let mut frontier = vec![first];
    while let Some(state) = frontier.pop() {
        if !search.layout.is_frozen(state.word) {
            return true;
        }
        for next in (0..2).flat_map(|thread| search.steps(&state, thread)) {
            if seen.insert(next, ()).is_none() {
                frontier.push(next);
            }
        }
    }
    false
}

/// With the loop, the same search finds no violation.
#[test]
fn search_r9_the_loop_is_what_keeps_frozen() {
    assert!(lost_frozen(getters(4, 2, Variant::WipesOnce)));
    assert!(!lost_frozen(getters(4, 2, Variant::Ours)));
}

/// R1, R3, R4, R6, R7, R8, R11: whatever three threads do, with one or two references at a time,
/// over as many generations as the field can distinguish, all rules hold in all states.
#[test]
fn search_all_rules_hold_while_generations_differ() {
    assert!(run_free(Variant::Ours, 1, 1).unwrap() > 1000);
    assert!(run_free(Variant::Ours, 2, 3).unwrap() > 1000);
}

/// R8, the bound of the generation: a put that sleeps through all generations is fooled. With the
/// 24 bits of the real word this takes 2^24 generations of one frame between two instructions.
#[test]
fn search_r8_a_reused_generation_fools_a_sleeping_put() {
    for generation_bits in [1, 2] {
        let found = run_free(Variant::Ours, generation_bits, 1 << generation_bits).unwrap_err();
        assert!(found.starts_with("R8"), "{found}");
    }
}

/// Every wrong step is found.
#[test]
fn search_finds_each_wrong_step() {
    for variant in [
        Variant::Subtracts,
        Variant::WipesByStore,
        Variant::FreesWithoutCas,
        Variant::KeepsGeneration,
    ] {
        assert!(run_free(variant, 2, 3).is_err(), "{variant:?} breaks no rule");
    }
}

/// R10, R11: gets of one and two at the limit are refused, exact, and never look frozen, while one
/// owner stays. (Otherwise, if all owners put their references between a refused get's add and its
/// return, the return would be the last put. In the real word that takes 2^38 puts between two
/// instructions.)
#[test]
fn search_r10_the_limit_refuses_while_an_owner_stays() {
    for count_bits in [3, 4] {
        let layout = Layout { count_bits, generation_bits: 1 };
        let held_max = layout.count_max() + 1;
        let search = Search {
            layout,
            variant: Variant::Ours,
            references_max: 2,
            held_max,
            uses_max: 0,
            passive: 1,
        };
        let threads = [holding(1), IDLE, IDLE];
        assert!(
            search.run(SearchState { word: layout.live(0, 1), threads, uses: 0 }).unwrap() > 50
        );
    }
}

/// R11: putting more references than exist is a bug that debug builds report.
#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "put of 2")]
fn search_r11_a_put_below_zero_is_reported() {
    let word = PinWord::default();
    word.init_free();
    word.init(1);
    let _ = word.put_and_test(2);
}

/// The search covers the real code: `Layout` at the real width decides like `PinState`.
#[test]
fn search_mirrors_the_real_decisions() {
    let counts = [0, 1, 2, COUNT_MAX - 1, COUNT_MAX, COUNT_MAX + 1, REAL.count_mask()];
    let generations = [0, 1, 5, (1 << 24) - 1];
    assert_eq!(REAL.count_max(), COUNT_MAX);
    for (generation, count) in generations.into_iter().flat_map(|g| counts.map(|c| (g, c))) {
        for word in [REAL.live(generation, count), REAL.frozen(generation) | count] {
            let state = PinState(word);
            assert_eq!(state.generation(), REAL.generation(word));
            assert_eq!(state.is_frozen(), REAL.is_frozen(word));
            assert_eq!(state.is_got(), REAL.is_got(word));
            for of in generations {
                assert_eq!(state.wiped(of).map(|wiped| wiped.0), REAL.wiped(word, of));
            }
        }
        assert_eq!(PinState::frozen(generation).0, REAL.frozen(generation));
        if count <= COUNT_MAX {
            assert_eq!(PinState::live(generation, count).0, REAL.live(generation, count));
        }
    }
}

/// The steps as well: the real word and the step machine agree over random operations of one
/// thread.
#[test]
fn search_mirrors_the_real_steps() {
    let search = Search {
        layout: REAL,
        variant: Variant::Ours,
        references_max: 3,
        held_max: COUNT_MAX,
        uses_max: u64::MAX,
        passive: 0,
    };
    let word = PinWord::default();
    word.init_free();
    let mut state = SearchState { word: word.state().0, threads: [FREED], uses: 0 };
    let mut random = 1_u64;
    for _ in 0..10_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let references = (random >> 33) % 3 + 1;
        let now = state.threads[0];
        let (next, agrees) = match now.owner {
            Some(Owner::Froze(references)) => {
                word.unfreeze(references);
                (
                    SearchState { word: word.state().0, threads: [holding(references)], ..state },
                    true,
                )
            }
            Some(Owner::Freed | Owner::FreedLater) => {
                // A get of a free word fails and is wiped.
                let agrees = word.try_get(references) == TryGet::Frozen;
                word.init(1);
                (search.steps(&state, 0)[0], agrees)
            }
            None if random >> 63 == 0 => {
                let agrees = word.try_get(references) == TryGet::Got;
                let (after, changed) = search.get(state.word, now, references);
                (SearchState { word: after, threads: [changed], ..state }, agrees)
            }
            None if (random >> 62) & 1 == 0 => {
                assert!(word.try_freeze(now.held));
                let owner = Some(Owner::Froze(now.held));
                let frozen = REAL.frozen(REAL.generation(state.word));
                (SearchState { word: frozen, threads: [Thread { owner, ..IDLE }], ..state }, true)
            }
            None => {
                let references = references.min(now.held);
                let last = word.put_and_test(references) == Put::Last;
                let (after, changed) = search.put(&state, now, references);
                let mut next = SearchState { word: after, threads: [changed], ..state };
                if matches!(changed.step, Step::Staged { .. }) {
                    next = search.steps(&next, 0)[0];
                }
                (next, last == (next.threads[0].owner == Some(Owner::Freed)))
            }
        };
        state = next;
        assert!(agrees && word.state().0 == state.word, "{state:?}, {:?}", word.state());
    }
}
