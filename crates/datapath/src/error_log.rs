//! Something that fails over and over: said when it begins, and once more when it is over, with what was lost by it.

/// What has been said, and what has been lost since.
#[derive(Debug, Default)]
pub struct Trouble {
    is_said: bool,
    lost: usize,
}

impl Trouble {
    /// It fails. Is that news?
    pub fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_said, true)
    }

    /// So many were given up.
    pub fn lose(&mut self, lost: usize) {
        self.lost += lost;
    }

    /// It is over. How many were lost by it, where that is worth a line.
    pub fn end(&mut self) -> Option<usize> {
        let Self { is_said, lost } = std::mem::take(self);
        (is_said && lost > 0).then_some(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_said_once_and_its_losses_at_its_end() {
        let mut trouble = Trouble::default();
        assert_eq!(trouble.end(), None, "nothing was wrong");
        assert_eq!([trouble.begin(), trouble.begin()], [true, false]);
        for lost in [2, 0, 3] {
            trouble.lose(lost);
        }
        assert_eq!([trouble.end(), trouble.end()], [Some(5), None]);
        assert_eq!((trouble.begin(), trouble.end()), (true, None), "nothing was lost by it");
        assert!(trouble.begin(), "another one");
    }
}
