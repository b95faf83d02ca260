"""The rows of docs/results.md: tasks, published figures and our programs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure that somebody else published.

    Attributes:
        model: the model's name.
        figure: the figure as it was published.
        source: who published it.
        address: where.
    """

    model: str
    figure: str
    source: str
    address: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A table of the page.

    Attributes:
        name: in runs and on the command line.
        title: the table's heading.
        about: the split and the settings, as a paragraph.
        program: the program's name and arguments.
        metrics: the metrics that the table shows, with their names there.
        published: others' figures.
        verdict: how ours compares, as a paragraph.
    """

    name: str
    title: str
    about: str
    program: tuple[str, ...]
    metrics: dict[str, str]
    published: tuple[Published, ...]
    verdict: str


_GC_MC = ("GC-MC", "https://github.com/riannevdberg/gc-mc")
_KERAS_RS_DCN = (
    "keras_rs",
    "https://keras.io/keras_rs/examples/dcn/",
)
_TFRS_DCN = ("TFRS", "https://www.tensorflow.org/recommenders/examples/dcn")
_TFRS_RETRIEVAL = (
    "TFRS",
    "https://www.tensorflow.org/recommenders/examples/basic_retrieval",
)
_TFRS_DEEP = (
    "TFRS",
    "https://www.tensorflow.org/recommenders/examples/deep_recommenders",
)
_KERAS_RS_LISTS = (
    "keras_rs",
    "https://keras.io/keras_rs/examples/listwise_ranking/",
)
_KERAS_RS_DEEP = (
    "keras_rs",
    "https://keras.io/keras_rs/examples/deep_recommender/",
)
_RECOMMENDERS = (
    "recommenders-team",
    "https://github.com/recommenders-team/recommenders",
)
_CORNAC = ("Cornac", "https://github.com/PreferredAI/cornac")
_RECBOLE = (
    "RecBole",
    "https://github.com/kanishkaRandunu/pswrec2k26/blob/"
    "0f53911addb44c768acf9675d8915264dd9f2e92/results/ml100k_results.md",
)

ROWS = (
    Row(
        "rating_u1",
        "Ratings, fold u1",
        "GroupLens's u1: rows 1 to 20,000 of u.data are the test, in which 459 "
        "users have ratings. Metric: RMSE in stars, less is better. Settings "
        "were chosen on a tenth of the training set; each seed is another set "
        "of initial values, order, and sample of long histories. The last row "
        "averages the predictions of the five models.",
        ("rating.py", "u1"),
        {"rmse": "RMSE"},
        (
            Published("GC-MC", "0.910", *_GC_MC),
            Published("GC-MC with features", "0.905", *_GC_MC),
            Published(
                "GLocal-K, epoch chosen on the test set",
                "0.8889",
                "GLocal-K",
                "https://github.com/usydnlp/Glocal_K",
            ),
        ),
        "One model is between GC-MC without and with features; the average of "
        "five models is a little better than both, but costs five trainings. "
        "GLocal-K's figure is better than ours. Its best epoch is chosen by "
        "the test set, so the two can't be compared directly.",
    ),
    Row(
        "rating_folds",
        "Ratings, five folds",
        "GroupLens's u1 to u5, one model for each fold; the error is over "
        "folds. The published folds are drawn at random by scikit-surprise, so "
        "the test sets differ.",
        ("rating.py", "folds"),
        {"rmse": "RMSE"},
        (
            Published(
                "SVD, random folds",
                "0.9355",
                "scikit-surprise",
                "https://surpriselib.com",
            ),
        ),
        "Ours also reads features of users and movies, and who rated what; "
        "SVD reads numbers of users and movies alone.",
    ),
    Row(
        "dcn_keras_rs",
        "Deep & Cross networks, keras_rs's setting",
        "80% to train, 20% to test, drawn at random for each seed; AdamW, 10 "
        "epochs of batches of 1,024. keras_rs's program takes training and "
        "test set from two passes over a data set that is shuffled anew for "
        "each pass: on average 80% of its test ratings are in its training "
        'set. Rows with "test overlaps training" repeat that split; the '
        "others have disjoint sets. The error is a standard error, except for "
        "keras_rs's, which is a standard deviation.",
        ("dcn.py", "keras_rs"),
        {"rmse": "RMSE"},
        (
            Published("DCN", "0.9136 ± 0.0030", *_KERAS_RS_DCN),
            Published("low-rank DCN", "0.9156", *_KERAS_RS_DCN),
            Published("deep network", "0.9174", *_KERAS_RS_DCN),
        ),
        "Where the test overlaps, ours are within two standard errors of "
        "keras_rs's. With disjoint sets all three are overfitted after ten "
        "epochs, the cross networks most: the mean rating of the training set, "
        "without any model, has 1.124; the next table has shorter trainings. "
        "The last epoch's error is shown, as keras_rs has it. It swings from "
        "epoch to epoch, as each has the same batches: with the test that "
        "overlaps, seed 0 of DCN has 0.892, 0.860, 0.893, 0.863 and 0.919 "
        "after the last five. One thread repeats that, but an earlier run of "
        "seed 0, probably on two threads, had 1.095, and 1.224 with the "
        "disjoint test where this table's has 1.114. In that run "
        "tf_keras's own Embedding in the place of ours had the same errors "
        "for four epochs, to 0.001, and with the disjoint test 1.138 after "
        "ten. keras_rs's program itself, in Keras 3 and with its "
        "own layers, had an RMSE of 0.8312 in one run here, with the test that "
        "overlaps. `make tutorials` runs keras_rs's program with its layers "
        "and with ours for Keras 3, and compares all losses.",
    ),
    Row(
        "dcn_tfrs",
        "Deep & Cross networks, TFRS's setting",
        "80% to train, 20% to test, drawn at random for each seed: TFRS's own "
        "draw depends on the order of TensorFlow Datasets's files. Adam, 8 "
        "epochs of batches of 8,192, the same batches in each epoch.",
        ("dcn.py", "tfrs"),
        {"rmse": "RMSE"},
        (Published("DCN, low-rank, deep", "0.9326 to 0.9334", *_TFRS_DCN),),
        "Ours are 0.003 to 0.008 above TFRS's figures, the low-rank DCN's by "
        "less than two standard errors. Between our three models there is no "
        "difference beyond two standard errors. TFRS's program itself, with "
        "its own layers and its seed, had an RMSE of 0.9470 in one run "
        "here: with this TensorFlow and these files TFRS's layers don't "
        "reach its figure either. `make "
        "tutorials` runs TFRS's program with its layers and with ours, from "
        "the same initial values, and compares all losses.",
    ),
    Row(
        "retrieval_tfrs",
        "Retrieval with two towers",
        "80% to train, 20% to test, drawn at random for each seed. Metric: how "
        "often the title that was chosen is among the best of all 1,682 "
        "movies. Titles that the user chose in training are ranked too. "
        '"corrected" gives `tfrs.tasks.Retrieval` the sampling '
        "probabilities, leaves accidental hits out, and has 6 epochs of "
        "batches of 1,024; nothing of it was tuned.",
        ("two_towers.py",),
        {"top-100": "top-100", "top-10": "top-10"},
        (
            Published(
                "two towers",
                "0.2322 to 0.2334; top-10 0.0212 to 0.0219",
                *_TFRS_RETRIEVAL,
            ),
        ),
        "As the tutorial, ours is a little above TFRS's top-100, whose split "
        "is another one, and has its top-10. The titles that most people "
        "chose, the same for all users, are better than both. The corrected "
        "model is better than them among the best 100, but not among the best "
        "10. It takes 474 steps where the tutorial takes 30, and shuffles in "
        "each epoch; what its changes do one by one wasn't tried. "
        "`make tutorials` runs TFRS's program itself with its layers and with "
        "ours, from the same initial values, and compares all losses.",
    ),
    Row(
        "deep_retrieval_tfrs",
        "Retrieval with deep towers, TFRS's setting",
        "Split and metric are those of the table above; here top-10 is ours "
        "alone. A user's tower also reads when the title was chosen, a movie's "
        "the words of its title; one to three dense layers follow. Adagrad, "
        "batches of 2,048. TFRS trains for 300 epochs; ours for 40, as many as "
        "this page's machine does in about six minutes.",
        ("deep_choices.py",),
        {"top-100": "top-100", "top-10": "top-10"},
        (
            Published("1 layer", "around 0.27", *_TFRS_DEEP),
            Published("2 layers", "0.29", *_TFRS_DEEP),
            Published("3 layers", "no better than 1 layer", *_TFRS_DEEP),
        ),
        "After 40 epochs ours are below TFRS's figures, with one layer by "
        "0.01, with two by 0.03; three layers are the worst. One run each, so "
        "differences of 0.01 say nothing. Whether 300 epochs close the gap "
        "wasn't tried. The most rated titles, the same for all users, are "
        "better than each of these models, and than TFRS's, whose split is "
        "another one. TFRS gives its figures in the tutorial's text, to two "
        "digits, and none for three layers.",
    ),
    Row(
        "listwise",
        "Order within short lists",
        "70% of the ratings to train, another 15% to test, drawn at random for "
        "each seed; keras_rs's draw depends on the order of TensorFlow "
        "Datasets's files. No rating is in both. A list has five ratings of a "
        "user: 50 lists of each user to train on, which share ratings, and one "
        "to test with, of users with five ratings or more. Metric: NDCG, with "
        "gains of 2^r - 1 for ratings r on a scale from 0 to 1. The rows "
        "without a model order each list at random, or by the movies' mean "
        "ratings in the training set, each with five more ratings of the "
        "overall mean.",
        ("lists.py",),
        {"ndcg@5": "NDCG@5"},
        (
            Published("squared error", "0.9109", *_KERAS_RS_LISTS),
            Published("hinge loss of pairs", "0.9348", *_KERAS_RS_LISTS),
        ),
        "Ours has what keras_rs publishes, within two standard errors. But a "
        "random order of five movies has an NDCG of 0.886 already, and the "
        "mean ratings, which are the same for all users, order them as well "
        "as the better model, or better. The notebook "
        "[listwise](examples.md#notebooks) has a model that is better than "
        "both.",
    ),
    Row(
        "deep_retrieval",
        "Retrieval with deep towers",
        "80% to train, 20% to test, drawn at random for each seed. Towers of "
        "one to three dense layers, of features of users and of movies; their "
        "product is trained to be the rating, with the squared error. Metric: "
        "how often a movie with five stars in the test is among the user's "
        "best 100 of all movies, those of the training set too. keras_rs "
        "hashes age and gender together into 20 rows, where some share one; "
        "here each of the 20 pairs has a row. The row without a model has the "
        "100 movies with the most ratings for all users.",
        ("deep_towers.py",),
        {"top-100": "top-100", "rmse": "RMSE in stars"},
        (
            Published("1 layer", "0.3100", *_KERAS_RS_DEEP),
            Published("2 layers", "0.3093", *_KERAS_RS_DEEP),
            Published("3 layers", "0.3006", *_KERAS_RS_DEEP),
        ),
        "Ours is a little above keras_rs's, whose split is another one. But "
        "the 100 movies that most people rated, the same for all users, have "
        "0.418: a model that learns stars doesn't learn what people watch, and "
        "ranks obscure movies high. The notebook "
        "[multitask](examples.md#notebooks) trains for both.",
    ),
    Row(
        "recommenders_team",
        "Ranking, recommenders-team's split",
        "75% of each movie's ratings to train, the rest to test, with the "
        "random numbers of their program: the same split. Movies that a user "
        "has in training are left out of the user's ranking. The model is an "
        "autoencoder of histories; its dropout and number of epochs were "
        "chosen on a fifth of the training set.",
        ("histories.py", "recommenders_team"),
        {"ndcg@10": "NDCG@10", "auc": "AUC"},
        (
            Published("BiVAE", "0.4751", *_RECOMMENDERS),
            Published("BPR", "0.4420", *_RECOMMENDERS),
            Published("LightGCN", "0.4198", *_RECOMMENDERS),
        ),
        "Ours is above BPR and LightGCN, and below BiVAE. The figures are of "
        "their README; the output that is kept in their notebook has 0.4687, "
        "0.4450 and 0.4164. They publish no AUC.",
    ),
    Row(
        "cornac",
        "Ranking, Cornac's split",
        "`RatioSplit(test_size=0.2, rating_threshold=4.0, seed=123)`, with the "
        "same random numbers: the same split. Movies with 4 or 5 stars are to "
        "be found. Cornac ranks all movies but those that the user is known to "
        "like, so movies to which the user gave 1 to 3 stars in training are "
        "candidates. The model and its settings are those of the row above.",
        ("histories.py", "cornac"),
        {"ndcg@10": "NDCG@10", "auc": "AUC"},
        (
            Published(
                "BPR",
                "0.0975; AUC 0.8695; trained in 3.74 s",
                *_CORNAC,
            ),
        ),
        "Ours is trained to predict movies with 4 or 5 stars. Cornac's BPR "
        "takes each rating as a choice, also one of 1 star, so that it ranks "
        "high what the user has rated low: this may explain a part of the "
        "difference. Their time is of another machine.",
    ),
    Row(
        "next_item",
        "The next movie: SASRec and HSTU",
        "Movies with five ratings or more; each user's last movie is the test. "
        'Metrics of a ranking of all 1,349 movies; "of unrated" leaves out '
        "what the user has rated. HSTU reads the times of ratings, SASRec "
        "doesn't. All settings are SASRec's, chosen by its validation; HSTU's "
        "weren't tuned. A step trains on 32 histories of 51 movies.",
        ("next_item.py",),
        {
            "HR@10": "HR@10",
            "NDCG@10": "NDCG@10",
            "HR@10 of unrated": "HR@10 of unrated",
            "NDCG@10 of unrated": "NDCG@10 of unrated",
            "ms a step": "ms a step",
        },
        (Published("SASRec", "0.1198; NDCG@10 0.0594", *_RECBOLE),),
        "With 943 users an HR@10 has a standard error of 0.011 by the choice "
        "of users alone, so HSTU, our SASRec and RecBole's are about alike. "
        "[Examples](examples.md#what-comes-next) has our SASRec's mean over "
        "three seeds: an HR@10 of 0.1357 and an NDCG@10 of 0.0624, of unrated "
        "0.2153 and 0.1108.",
    ),
)
