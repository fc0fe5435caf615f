//! Lists of pages, linked by their numbers: what every model is made of.
//!
//! A page is in at most one of the lists, and each operation takes constant time.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
    list: u32,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    newest: u32,
    oldest: u32,
    pages: usize,
}

/// `N` lists over the pages 0 to `pages - 1`.
#[derive(Debug)]
pub(crate) struct Queues<const N: usize> {
    links: Vec<Link>,
    ends: [Ends; N],
}

impl<const N: usize> Queues<N> {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            links: vec![Link { newer: NONE, older: NONE, list: NONE }; pages],
            ends: [Ends { newest: NONE, oldest: NONE, pages: 0 }; N],
        }
    }

    pub(crate) fn list_of(&self, page: u32) -> Option<usize> {
        Some(self.links[page as usize].list).filter(|list| *list != NONE).map(|list| list as usize)
    }

    pub(crate) fn is_in(&self, list: usize, page: u32) -> bool {
        self.links[page as usize].list == list as u32
    }

    pub(crate) fn len(&self, list: usize) -> usize {
        self.ends[list].pages
    }

    pub(crate) fn oldest(&self, list: usize) -> Option<u32> {
        Some(self.ends[list].oldest).filter(|page| *page != NONE)
    }

    /// Returns the neighbour of a page that was pushed after it.
    pub(crate) fn newer(&self, page: u32) -> Option<u32> {
        Some(self.links[page as usize].newer).filter(|page| *page != NONE)
    }

    /// Moves a page, from wherever it is, to the newest position of a list.
    pub(crate) fn push(&mut self, list: usize, page: u32) {
        self.remove(page);
        let older = self.ends[list].newest;
        self.links[page as usize] = Link { newer: NONE, older, list: list as u32 };
        match older {
            NONE => self.ends[list].oldest = page,
            older => self.links[older as usize].newer = page,
        }
        self.ends[list].newest = page;
        self.ends[list].pages += 1;
    }

    /// Removes the page that was pushed first.
    pub(crate) fn pop(&mut self, list: usize) -> Option<u32> {
        let page = self.oldest(list)?;
        self.remove(page);
        Some(page)
    }

    /// Takes a page off its list, if it is in one.
    pub(crate) fn remove(&mut self, page: u32) {
        let Link { newer, older, list } = self.links[page as usize];
        if list == NONE {
            return;
        }
        let ends = &mut self.ends[list as usize];
        ends.pages -= 1;
        match newer {
            NONE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.ends[list as usize].oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        self.links[page as usize].list = NONE;
    }
}
