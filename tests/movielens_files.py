"""Little data in the format of MovieLens's files, for the examples."""

import numpy as np

USERS, MOVIES, RATINGS = 60, 80, 1200


def write(folder):
    """Writes ratings that depend on who rates what."""
    rng = np.random.default_rng(0)
    with (folder / "ml-100k.user").open("w") as file:
        print("user_id\tage\tgender\toccupation\tzip_code", file=file)
        for user in range(USERS):
            age, zip_code = 20 + user % 40, 10_000 + 777 * user
            print(
                user, age, "MF"[user % 2], "none", zip_code, sep="\t", file=file
            )
    with (folder / "ml-100k.item").open("w") as file:
        print("item_id\tmovie_title\trelease_year\tclass", file=file)
        for movie in range(MOVIES):
            title, year = f"part {movie % 7} of {movie}", 1920 + movie
            print(movie, title, year, "Drama", sep="\t", file=file)
    with (folder / "ml-100k.inter").open("w") as file:
        print("user_id\titem_id\trating\ttimestamp", file=file)
        for second in range(RATINGS):
            user, movie = rng.integers(USERS), rng.integers(MOVIES)
            stars = 1 + (user + movie + rng.integers(2)) % 5
            print(user, movie, stars, second, sep="\t", file=file)
