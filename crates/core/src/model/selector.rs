//! Label selectors (`metav1.LabelSelector`).

use super::view::Labels;

/// Values of a label, sorted. All policies of a large cluster have some, and a tree of one value takes 280 bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelValues(Box<[String]>);

impl LabelValues {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn contains(&self, value: &String) -> bool {
        self.0.binary_search(value).is_ok()
    }
}

impl FromIterator<String> for LabelValues {
    fn from_iter<I: IntoIterator<Item = String>>(values: I) -> Self {
        let mut values: Vec<String> = values.into_iter().collect();
        values.sort_unstable();
        values.dedup();
        Self(values.into())
    }
}

/// One condition on the labels of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Requirement {
    /// The label has one of these values.
    In(String, LabelValues),
    /// The label has none of these values, or is absent.
    NotIn(String, LabelValues),
    Exists(String),
    DoesNotExist(String),
}

impl Requirement {
    fn matches(&self, labels: &Labels) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

/// Requirements that must all hold. The default matches all labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector(Box<[Requirement]>);

impl Selector {
    /// Matches no labels.
    pub fn nothing() -> Self {
        Self::from_iter([Requirement::In(String::new(), LabelValues::from_iter([]))])
    }

    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| requirement.matches(labels))
    }
}

impl FromIterator<Requirement> for Selector {
    fn from_iter<I: IntoIterator<Item = Requirement>>(requirements: I) -> Self {
        Self(requirements.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_is_as_kubernetes_defines_it() {
        let labels = Labels::from([("env".to_owned(), "prod".to_owned())]);
        let set = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect::<LabelValues>();
        let matches = |requirement| Selector::from_iter([requirement]).matches(&labels);
        assert!(matches(Requirement::In("env".into(), set(&["dev", "prod"]))));
        assert!(matches(Requirement::In("env".into(), set(&["prod", "dev", "stage", "prod"]))), "in any order");
        assert_eq!(set(&["b", "a", "b"]), set(&["a", "b"]));
        assert!(!matches(Requirement::In("env".into(), set(&["dev"]))));
        assert!(!matches(Requirement::In("tier".into(), set(&["prod"]))));
        assert!(!matches(Requirement::NotIn("env".into(), set(&["prod"]))));
        assert!(matches(Requirement::NotIn("tier".into(), set(&["prod"]))), "an absent label is in no set");
        assert!(matches(Requirement::Exists("env".into())) && !matches(Requirement::Exists("tier".into())));
        assert!(matches(Requirement::DoesNotExist("tier".into())) && !matches(Requirement::DoesNotExist("env".into())));
        assert!(Selector::default().matches(&labels));
        let both = [Requirement::Exists("env".into()), Requirement::Exists("tier".into())];
        assert!(!Selector::from_iter(both).matches(&labels), "all must hold");
    }
}
